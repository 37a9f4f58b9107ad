"""The baselines' draft length: the same for every row, always."""

from __future__ import annotations

import dataclasses

import jax

from aspire_jax.draft_length.interface import MOST_DRAFTS, Outcome, State, View, in_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedDraftLength:
    """Every row drafts `gamma` tokens, then verifies; rows keep in step (the synchronised baselines)."""

    gamma: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.gamma <= MOST_DRAFTS:
            raise ValueError(f"gamma: {self.gamma}, expected 1 to {MOST_DRAFTS}")

    @property
    def d_max(self) -> int:
        return self.gamma

    def init(self, batch: int) -> State:
        return ()

    def decide(self, state: State, view: View) -> jax.Array:
        wants = view.active & (view.drafted < view.limit)
        return in_step(wants)

    def update(self, state: State, outcome: Outcome) -> State:
        return state

    def forget(self, state: State, rows: jax.Array) -> State:
        return state
