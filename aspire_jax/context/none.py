"""No sparse context: nothing is ever drafted (AutoRegressive)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from aspire_jax.config import ModelConfig
from aspire_jax.context.policy import Plan, Room, Scores, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoContext:
    """Selects nothing."""

    def plan(self, config: ModelConfig) -> Plan:
        return Plan(sets=(0,) * config.n_layers)

    def capacity(self, room: Room) -> int:
        return 0

    def init(self, config: ModelConfig, batch: int, room: Room) -> State:
        return ()

    def observe(self, state: State, scores: Scores) -> State:
        return state

    def select(self, state: State, lengths: jax.Array, room: Room) -> jax.Array:
        return jnp.zeros((1, lengths.shape[0], 0), jnp.int32)

    def forget(self, state: State, rows: jax.Array) -> State:
        return state
