"""ASPIRE's sparse context: the pages that a refresh layer last attended to serve the others."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.config import ModelConfig
from aspire_jax.context.pages import best_pages, pages_of
from aspire_jax.context.policy import Plan, Room, Scores


def serving(layers: tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    """For each layer, which of the refresh `layers` serves it: the nearest not behind it.

    Layers before the first are served by the last one, whose latest selection they get a step later.
    """
    return tuple(max((j for j, r in enumerate(layers) if r <= i), default=len(layers) - 1) for i in range(n_layers))


def checked(layers: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The refresh `layers`, which must be layers of the model in ascending order."""
    for layer in layers:
        if not 0 <= layer < config.n_layers:
            raise ValueError(f"layers: {layer}, expected 0 to {config.n_layers - 1}")
    if not layers or list(layers) != sorted(set(layers)):
        raise ValueError(f"layers: {layers}, expected different layers in ascending order")
    return layers


@flax.struct.dataclass
class PageMass:
    """Latest scores of each refresh layer: mass [R, B, P]."""

    mass: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefreshContext:
    """ASPIRE's sparse context (arXiv 2609.17943, section 3): one page set a row, from the refresh layer's last step.

    With several refresh layers there is a set for each: it serves the layers behind it up to the next, within the same
    step where they refresh while drafting. The layers before the first use the last one's set of the step before.

    Attributes:
      rho: share of the context to read.
      k_min: pages to read at least.
      recent: last pages that are always read.
      layers: refresh layers; None is the last but one.
      renew: "step" refreshes at every draft step, as in the paper; the refresh layer then reads the full context while
        drafting. "verification" refreshes when a row verifies and spares that read. None: "step" where rows mix,
        "verification" where they keep in step (there a renewal is a copy, and acceptance is the same; see
        docs/architecture.md).
    """

    rho: float = 0.07
    k_min: int = 32
    recent: int = 8
    layers: tuple[int, ...] | None = None
    renew: Literal["step", "verification"] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rho <= 1:
            raise ValueError(f"rho: {self.rho}, expected a share between 0 and 1")
        if self.k_min < 1:
            raise ValueError(f"k_min: {self.k_min}, expected at least 1")
        if not 1 <= self.recent <= self.k_min:
            raise ValueError(f"recent: {self.recent}, expected 1 to k_min ({self.k_min})")

    def plan(self, config: ModelConfig) -> Plan:
        layers = checked((max(config.n_layers - 2, 0),) if self.layers is None else self.layers, config)
        step = self.renew != "verification"
        return Plan(
            verify_layers=layers,
            refresh_layers=layers if step else (),
            sets=serving(layers, config.n_layers),
            same_step=step and len(layers) > 1,
            renew="step" if step else "verification",
        )

    def capacity(self, room: Room) -> int:
        return min(room.pages, max(self.k_min, math.ceil(self.rho * room.pages)))

    def init(self, config: ModelConfig, batch: int, room: Room) -> PageMass:
        return PageMass(jnp.zeros((len(self.plan(config).verify_layers), batch, room.pages), jnp.float32))

    def observe(self, state: PageMass, scores: Scores) -> PageMass:
        # Several refresh layers report one by one where each serves those behind it within the step.
        order, mass = self.layers or scores.layers, state.mass
        for i, layer in enumerate(scores.layers):
            j = order.index(layer)
            mass = mass.at[j].set(jnp.where(scores.rows[i][:, None], scores.mass[i], mass[j]))
        return PageMass(mass)

    def select(self, state: PageMass, lengths: jax.Array, room: Room) -> jax.Array:
        pages = pages_of(lengths, room.page_size)
        capacity = self.capacity(room)
        share = jnp.ceil(np.float32(self.rho) * pages.astype(jnp.float32)).astype(jnp.int32)
        budget = jnp.minimum(jnp.maximum(share, min(self.k_min, capacity)), capacity)
        return best_pages(state.mass, pages, budget, self.recent, capacity, room.kernels)

    def forget(self, state: PageMass, rows: jax.Array) -> PageMass:
        return PageMass(jnp.where(rows[None, :, None], np.float32(0.0), state.mass))
