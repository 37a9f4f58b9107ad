"""Vegas' sparse context: each layer's own best tokens, by what the last verification attended to."""

from __future__ import annotations

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.config import ModelConfig
from aspire_jax.context.pages import pages_of, top_pages
from aspire_jax.context.policy import Plan, Room, Scores


@flax.struct.dataclass
class LayerMass:
    """Scores of the last verification.

    Attributes:
      mass: [L, B, P] of every layer.
      scored: [B] committed tokens they cover.
    """

    mass: jax.Array
    scored: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class VegasContext:
    """A page set a layer, chosen after every verification by its own attention (arXiv 2602.07223).

    Scores are averaged over the first and the last query of the verification and over all heads. The first selection
    comes from the prompt's last token: a request's first step is a verification of that one. Tokens committed since the
    scores were taken are always read. There are no sinks and no window.

    The original chooses single tokens; so does this policy where a page is one token (`page_size=1`).

    Attributes:
      rho: share of the context to read.
      least: tokens to read at least.
    """

    rho: float = 0.07
    least: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.rho <= 1:
            raise ValueError(f"rho: {self.rho}, expected a share between 0 and 1")
        if self.least < 1:
            raise ValueError(f"least: {self.least}, expected at least 1")

    def plan(self, config: ModelConfig) -> Plan:
        layers = tuple(range(config.n_layers))
        return Plan(verify_layers=layers, heads="mean", sets=layers)

    def capacity(self, room: Room) -> int:
        share = math.ceil(self.rho * room.pages * room.page_size)
        # A verification commits up to d_max + 1 tokens, which lie on this many pages at most.
        unscored = room.pages_for(room.d_max) + 1
        return min(room.pages, room.pages_for(max(self.least, share)) + unscored)

    def init(self, config: ModelConfig, batch: int, room: Room) -> LayerMass:
        mass = jnp.zeros((config.n_layers, batch, room.pages), jnp.float32)
        return LayerMass(mass, jnp.zeros((batch,), jnp.int32))

    def observe(self, state: LayerMass, scores: Scores) -> LayerMass:
        rows = scores.rows  # all layers of a row are measured together
        return LayerMass(
            jnp.where(rows[:, :, None], scores.mass, state.mass), jnp.where(rows[0], scores.lengths, state.scored)
        )

    def select(self, state: LayerMass, lengths: jax.Array, room: Room) -> jax.Array:
        capacity = self.capacity(room)
        index = jnp.arange(room.pages, dtype=jnp.int32)[None]
        inside = index < pages_of(lengths, room.page_size)[:, None]
        unscored = inside & (index >= (state.scored // room.page_size)[:, None])
        share = jnp.ceil(np.float32(self.rho) * lengths.astype(jnp.float32)).astype(jnp.int32)
        best = pages_of(jnp.maximum(share, self.least), room.page_size)
        budget = jnp.minimum(best + jnp.sum(unscored, axis=1, dtype=jnp.int32), capacity)
        layers = state.mass.shape[0]
        inside, unscored = (jnp.broadcast_to(x[None], (layers, *x.shape)) for x in (inside, unscored))
        wanted = jnp.broadcast_to(budget[None], (layers, *budget.shape))
        return top_pages(state.mass, inside, unscored, wanted, capacity, room.kernels)

    def forget(self, state: LayerMass, rows: jax.Array) -> LayerMass:
        mass = jnp.where(rows[None, :, None], np.float32(0.0), state.mass)
        return LayerMass(mass, jnp.where(rows, 0, state.scored))
