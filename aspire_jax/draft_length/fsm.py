"""Feedback alone: one draft more after a full acceptance, one fewer otherwise (the paper's FSM baseline)."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from aspire_jax.draft_length.interface import DRAFT, MOST_DRAFTS, VERIFY, Outcome, View


@flax.struct.dataclass
class FsmState:
    """gamma [B] int32: drafts each row makes before it verifies."""

    gamma: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsmDraftLength:
    """Each row's draft length follows its own last verification; no model of costs.

    arXiv 2609.17943 names the baseline and leaves its step open: +1 where every draft was accepted, -1 where one was
    rejected, within 1 to `d_max`. A verification without drafts says nothing, and one cut short by the end of a request
    counts as any other.

    Attributes:
      d_max: most drafts a row may hold.
      gamma_init: drafts before a request's first verification of drafts.
    """

    d_max: int = 16
    gamma_init: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.d_max <= MOST_DRAFTS:
            raise ValueError(f"d_max: {self.d_max}, expected 1 to {MOST_DRAFTS}")
        if not 1 <= self.gamma_init <= self.d_max:
            raise ValueError(f"gamma_init: {self.gamma_init}, expected 1 to d_max ({self.d_max})")

    def init(self, batch: int) -> FsmState:
        return FsmState(jnp.full((batch,), self.gamma_init, jnp.int32))

    def decide(self, state: FsmState, view: View) -> jax.Array:
        wants = view.drafted < jnp.minimum(state.gamma, view.limit)
        return jnp.where(wants, DRAFT, VERIFY).astype(jnp.int32)

    def update(self, state: FsmState, outcome: Outcome) -> FsmState:
        change = jnp.where(outcome.accepted == outcome.drafts, 1, -1).astype(jnp.int32)
        measured = outcome.verified & (outcome.drafts > 0)
        return FsmState(jnp.where(measured, jnp.clip(state.gamma + change, 1, self.d_max), state.gamma))

    def forget(self, state: FsmState, rows: jax.Array) -> FsmState:
        return FsmState(jnp.where(rows, self.gamma_init, state.gamma).astype(jnp.int32))
