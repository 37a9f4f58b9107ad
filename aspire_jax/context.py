"""Context policies: which pages a drafting row may read.

A policy is a frozen dataclass (hashable: it is part of the static configuration) with five pure functions; its state is
a pytree with a leading batch axis that the engine carries. The engine measures attention where the policy's `Plan` says
so, hands the page scores over, and asks for a selection.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.config import ModelConfig

State = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a policy needs from the forward, all static.

    Attributes:
      verify_layers: layers whose page scores are measured for verifying rows.
      refresh_layers: layers that read the full context while drafting too, and whose page scores are measured then.
      heads: how weights combine over query heads: "max" or "mean" over all, or "kv" (mean over each group, scores
        keep a KV-head axis).
      sets: for each layer, the index of the selection it reads; (0,) * n_layers is one selection for all.
      same_step: a refresh layer's new selection serves the layers after it within the same draft step.
      renew: when drafting rows get a new selection: after every step ("step"), or only when they verify
        ("verification").
    """

    verify_layers: tuple[int, ...] = ()
    refresh_layers: tuple[int, ...] = ()
    heads: Literal["max", "mean", "kv"] = "max"
    sets: tuple[int, ...] = ()
    same_step: bool = False
    renew: Literal["step", "verification"] = "verification"

    @property
    def n_sets(self) -> int:
        """Number of different selections."""
        return max(self.sets, default=0) + 1


class Scores(NamedTuple):
    """Page scores of one step: the softmax mass of each page in each measured layer.

    Attributes:
      layers: the measured layers (static), in the order of `mass`.
      mass: [len(layers), B, P], or [len(layers), B, Hkv, P] where the plan's `heads` is "kv". For a verifying row the
        mean of its first and its last query. Zero beyond the committed tokens.
      rows: [len(layers), B] bool, the rows each layer was measured for in this step.
    """

    layers: tuple[int, ...]
    mass: jax.Array
    rows: jax.Array


class ContextPolicy(Protocol):
    """The interface. `pages` is the capacity of a row's page table, `lengths` [B] counts committed tokens."""

    def plan(self, config: ModelConfig) -> Plan:
        """What the engine must measure, and how the selection is shared."""

    def capacity(self, pages: int) -> int:
        """Most pages a row may ever select (static); 0 for a policy that never drafts."""

    def init(self, config: ModelConfig, batch: int, pages: int) -> State:
        """State before anything was measured."""

    def observe(self, state: State, scores: Scores) -> State:
        """Takes in one step's page scores."""

    def select(self, state: State, lengths: jax.Array, page_size: int) -> jax.Array:
        """Pages to read: positions in the page table [n_sets, B, capacity] int32, -1 where unused."""

    def forget(self, state: State, rows: jax.Array) -> State:
        """Resets the rows [B] bool that a new request takes over."""


def pages_of(lengths: jax.Array, page_size: int) -> jax.Array:
    """Pages that hold `lengths` tokens."""
    return (lengths + page_size - 1) // page_size


def best_pages(mass: jax.Array, pages: jax.Array, budget: jax.Array, recent: int, capacity: int) -> jax.Array:
    """The `recent` last pages of each row, and the highest-scoring others up to its budget.

    Args:
      mass: page scores [B, P].
      pages: pages in use [B].
      budget: pages to select [B], at most `capacity`.

    Returns:
      [B, capacity] int32 in no particular order, -1 where unused.
    """
    index = jnp.arange(mass.shape[-1])[None]
    inside = index < pages[:, None]
    always = index >= (pages - recent)[:, None]
    rank = jnp.where(inside, jnp.where(always, np.float32(np.inf), mass), np.float32(-1.0))
    best, chosen = jax.lax.top_k(rank, capacity)
    used = (jnp.arange(capacity)[None] < budget[:, None]) & (best >= 0)
    return jnp.where(used, chosen, -1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoContext:
    """Nothing is ever drafted (AutoRegressive)."""

    def plan(self, config: ModelConfig) -> Plan:
        return Plan(sets=(0,) * config.n_layers)

    def capacity(self, pages: int) -> int:
        return 0

    def init(self, config: ModelConfig, batch: int, pages: int) -> State:
        return ()

    def observe(self, state: State, scores: Scores) -> State:
        return state

    def select(self, state: State, lengths: jax.Array, page_size: int) -> jax.Array:
        return jnp.zeros((1, lengths.shape[0], 0), jnp.int32)

    def forget(self, state: State, rows: jax.Array) -> State:
        return state


@flax.struct.dataclass
class PageMass:
    """Latest scores of the refresh layer: mass [B, P]."""

    mass: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefreshContext:
    """ASPIRE's sparse context (arXiv 2609.17943, section 3): one page set a row, from the refresh layer's last step.

    Attributes:
      rho: share of the context to read.
      k_min: pages to read at least.
      recent: last pages that are always read.
      layer: refresh layer; None is the last but one.
      renew: "step" refreshes at every draft step, as in the paper; the refresh layer then reads the full context while
        drafting. "verification" refreshes when a row verifies and spares that read. None: "step" where rows mix,
        "verification" where they keep in step (there a renewal is a copy, and acceptance is the same; see
        docs/architecture.md).
    """

    rho: float = 0.07
    k_min: int = 32
    recent: int = 8
    layer: int | None = None
    renew: Literal["step", "verification"] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rho <= 1:
            raise ValueError(f"rho: {self.rho}, expected a share between 0 and 1")
        if not 1 <= self.recent <= self.k_min:
            raise ValueError(f"recent: {self.recent}, expected 1 to k_min ({self.k_min})")

    def plan(self, config: ModelConfig) -> Plan:
        layer = max(config.n_layers - 2, 0) if self.layer is None else self.layer
        if not 0 <= layer < config.n_layers:
            raise ValueError(f"layer: {self.layer}, expected 0 to {config.n_layers - 1}")
        return Plan(
            verify_layers=(layer,),
            refresh_layers=(layer,) if self.renew != "verification" else (),
            sets=(0,) * config.n_layers,
            renew=self.renew or "step",
        )

    def capacity(self, pages: int) -> int:
        return min(pages, max(self.k_min, math.ceil(self.rho * pages)))

    def init(self, config: ModelConfig, batch: int, pages: int) -> PageMass:
        return PageMass(jnp.zeros((batch, pages), jnp.float32))

    def observe(self, state: PageMass, scores: Scores) -> PageMass:
        return PageMass(jnp.where(scores.rows[0][:, None], scores.mass[0], state.mass))

    def select(self, state: PageMass, lengths: jax.Array, page_size: int) -> jax.Array:
        pages = pages_of(lengths, page_size)
        capacity = self.capacity(state.mass.shape[-1])
        share = jnp.ceil(np.float32(self.rho) * pages.astype(jnp.float32)).astype(jnp.int32)
        budget = jnp.minimum(jnp.maximum(share, min(self.k_min, capacity)), capacity)
        return best_pages(state.mass, pages, budget, self.recent, capacity)[None]

    def forget(self, state: PageMass, rows: jax.Array) -> PageMass:
        return PageMass(jnp.where(rows[:, None], np.float32(0.0), state.mass))
