"""Plain decoding: nothing is ever drafted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from aspire_jax.draft_length.interface import VERIFY, Outcome, State, View


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDraft:
    """Every step verifies nothing but the pending token: plain decoding."""

    @property
    def d_max(self) -> int:
        return 0

    def init(self, batch: int) -> State:
        return ()

    def decide(self, state: State, view: View) -> jax.Array:
        return jnp.full(view.active.shape, VERIFY, jnp.int32)

    def update(self, state: State, outcome: Outcome) -> State:
        return state

    def forget(self, state: State, rows: jax.Array) -> State:
        return state
