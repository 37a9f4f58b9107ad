"""A policy in a phase without drafts (see `aspire_jax.pause`): it is told of every step and asked for nothing."""

from __future__ import annotations

import dataclasses

import jax

from aspire_jax.draft_length.interface import DraftLengthPolicy, Outcome, State
from aspire_jax.draft_length.plain import NoDraft


@dataclasses.dataclass(frozen=True)
class Paused(NoDraft):
    """Plain decoding that keeps the state of `policy` up to date."""

    policy: DraftLengthPolicy

    def init(self, batch: int) -> State:
        return self.policy.init(batch)

    def update(self, state: State, outcome: Outcome) -> State:
        return self.policy.update(state, outcome)

    def forget(self, state: State, rows: jax.Array) -> State:
        return self.policy.forget(state, rows)
