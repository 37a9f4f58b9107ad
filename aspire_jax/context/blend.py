"""A sparse context from two sources: what a layer itself last attended to, and what a refresh layer attends to now."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.config import ModelConfig
from aspire_jax.context.pages import always, pages_of, top_pages
from aspire_jax.context.policy import Plan, Room, Scores
from aspire_jax.context.refresh import checked, serving


@flax.struct.dataclass
class BlendMass:
    """Latest scores of every layer: mass [L, B, P], or [L, B, Hkv, P] for each KV head."""

    mass: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendContext:
    """A page set a layer: sinks, a window, and the best pages by two scores.

    The layer's own scores are from the row's last verification; they know the layer but not the token. The refresh
    layer's are the other way round: where it refreshes while drafting it serves the layers behind it within the step
    (see `RefreshContext`). A share of the budget goes to each.

    Attributes:
      rho: share of the context to read.
      least: tokens to read at least.
      own: share of what sinks and window leave, for pages by the layer's own scores; the refresh layer chooses the
        rest.
      window: share of the budget for the last pages; more where a verification may commit more, since what it commits
        is scored by the next one only.
      sinks: first tokens that are always read.
      layers: refresh layers; None is the one at half the depth.
      heads: how scores combine over query heads; "kv" makes a selection for each KV head.
      renew: as `RefreshContext.renew`.
    """

    rho: float = 0.07
    least: int = 512
    own: float = 0.75
    window: float = 0.125
    sinks: int = 16
    layers: tuple[int, ...] | None = None
    heads: Literal["max", "mean", "kv"] = "mean"
    renew: Literal["step", "verification"] | None = None

    def __post_init__(self) -> None:
        for name in ("rho", "own", "window"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)}, expected a share between 0 and 1")
        if self.least < 1:
            raise ValueError(f"least: {self.least}, expected at least 1")
        if not 0 <= self.sinks <= self.least:
            raise ValueError(f"sinks: {self.sinks}, expected 0 to least ({self.least})")

    def plan(self, config: ModelConfig) -> Plan:
        layers = self._layers(config)
        every = tuple(range(config.n_layers))
        step = self.renew != "verification"
        return Plan(
            verify_layers=every if self.own > 0 else layers,
            refresh_layers=layers if step else (),
            heads=self.heads,
            sets=every,
            per_head=self.heads == "kv",
            same_step=step,
            renew="step" if step else "verification",
        )

    def capacity(self, room: Room) -> int:
        share = math.ceil(self.rho * room.pages * room.page_size)
        return room.pages_for(max(self.least, share))

    def init(self, config: ModelConfig, batch: int, room: Room) -> BlendMass:
        self._layers(config)
        heads = (config.n_kv_heads,) if self.heads == "kv" else ()
        return BlendMass(jnp.zeros((config.n_layers, batch, *heads, room.pages), jnp.float32))

    def observe(self, state: BlendMass, scores: Scores) -> BlendMass:
        if len(scores.layers) == state.mass.shape[0]:
            rows = scores.rows.reshape(*scores.rows.shape, *(1,) * (state.mass.ndim - 2))
            return BlendMass(jnp.where(rows, scores.mass, state.mass))
        mass = state.mass
        for i, layer in enumerate(scores.layers):
            rows = scores.rows[i].reshape(-1, *(1,) * (mass.ndim - 2))
            mass = mass.at[layer].set(jnp.where(rows, scores.mass[i], mass[layer]))
        return BlendMass(mass)

    def select(self, state: BlendMass, lengths: jax.Array, room: Room) -> jax.Array:
        share = jnp.ceil(np.float32(self.rho) * lengths.astype(jnp.float32)).astype(jnp.int32)
        tokens = jnp.maximum(share, self.least)
        own, window = jnp.float32(self.own), jnp.float32(self.window)
        return self.choose(state.mass, lengths, room, tokens, own, window)

    def choose(
        self, mass: jax.Array, lengths: jax.Array, room: Room, tokens: jax.Array, own: jax.Array, window: jax.Array
    ) -> jax.Array:
        """The selection for a budget of `tokens` [B] and shares `own` and `window` (scalars) in place of the fields.

        As arrays, so that a search over them compiles once.
        """
        capacity = self.capacity(room)
        budget = jnp.minimum(pages_of(tokens, room.page_size), capacity)
        recent = jnp.ceil(window * budget.astype(jnp.float32)).astype(jnp.int32)
        # What the last verification committed has no scores of its own yet: d_max + 1 tokens, on this many pages.
        recent = jnp.maximum(recent, room.pages_for(room.d_max) + 1)
        recent = jnp.clip(recent, 1, jnp.maximum(budget - room.pages_for(self.sinks), 1))
        inside, first = always(lengths, room, self.sinks, recent)
        free = jnp.maximum(budget - jnp.sum(first, axis=1, dtype=jnp.int32), 0)
        by_own = budget - free + jnp.round(own * free.astype(jnp.float32)).astype(jnp.int32)

        def spread(x: jax.Array) -> jax.Array:
            """[B, ...] along layers, and along KV heads where the scores have them."""
            extra = mass.ndim - 3
            x = x.reshape(1, x.shape[0], *(1,) * extra, *x.shape[1:])
            return jnp.broadcast_to(x, (*mass.shape[: 2 + extra], *x.shape[2 + extra :]))

        inside, first, budget, by_own = (spread(x) for x in (inside, first, budget, by_own))
        layers = self.layers or (mass.shape[0] // 2,)
        source = np.asarray(layers)[list(serving(layers, mass.shape[0]))]
        chosen = _mask(top_pages(mass, inside, first, by_own, capacity, room.kernels), room.pages)
        return top_pages(mass[source], inside, chosen, budget, capacity, room.kernels)

    def forget(self, state: BlendMass, rows: jax.Array) -> BlendMass:
        gone = rows.reshape(1, -1, *(1,) * (state.mass.ndim - 2))
        return BlendMass(jnp.where(gone, np.float32(0.0), state.mass))

    def _layers(self, config: ModelConfig) -> tuple[int, ...]:
        return checked((config.n_layers // 2,) if self.layers is None else self.layers, config)


def _mask(chosen: jax.Array, pages: int) -> jax.Array:
    """Selections [..., capacity] as masks [..., pages] bool."""
    flat = chosen.reshape(-1, chosen.shape[-1])
    row = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    mask = jnp.zeros((flat.shape[0], pages), bool)
    mask = mask.at[row, jnp.where(flat < 0, pages, flat)].set(True, mode="drop")
    return mask.reshape(*chosen.shape[:-1], pages)
