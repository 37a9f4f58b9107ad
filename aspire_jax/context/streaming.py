"""StreamingLLM's sparse context: the first tokens and the last ones, whatever attention says."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from aspire_jax.config import ModelConfig
from aspire_jax.context.pages import always, top_pages
from aspire_jax.context.policy import Plan, Room, Scores, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingContext:
    """Attention sinks and a sliding window (StreamingLLM, arXiv 2309.17453; for drafts MagicDec, arXiv 2408.11049).

    The window slides with every verification; what is drafted meanwhile is read as well.

    Attributes:
      budget: tokens a draft reads at most, sinks and window together; whole pages.
      sinks: first tokens that are always read.
    """

    budget: int = 512
    sinks: int = 16

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget: {self.budget}, expected at least 1")
        if not 0 <= self.sinks < self.budget:
            raise ValueError(f"sinks: {self.sinks}, expected 0 to less than budget ({self.budget})")

    def plan(self, config: ModelConfig) -> Plan:
        return Plan(sets=(0,) * config.n_layers)

    def capacity(self, room: Room) -> int:
        # A page for the sinks and one for the window, where pages are large: then more than the budget.
        return min(room.pages, max(room.pages_for(self.sinks) + 1, self.budget // room.page_size))

    def init(self, config: ModelConfig, batch: int, room: Room) -> State:
        return ()

    def observe(self, state: State, scores: Scores) -> State:
        return state

    def select(self, state: State, lengths: jax.Array, room: Room) -> jax.Array:
        capacity = self.capacity(room)
        inside, first = always(lengths, room, self.sinks, jnp.zeros_like(lengths))
        # Later pages rank higher, so what the sinks leave of the budget goes to the last pages.
        order = jnp.broadcast_to(jnp.arange(room.pages, dtype=jnp.float32)[None], inside.shape)
        wanted = jnp.full(lengths.shape, capacity, jnp.int32)
        return top_pages(order, inside, first, wanted, capacity, room.kernels)[None]

    def forget(self, state: State, rows: jax.Array) -> State:
        return state
