"""The hindsight oracle: drafts exactly what a recorded run accepted, so that no draft is ever rejected."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from aspire_jax.draft_length.interface import DRAFT, MOST_DRAFTS, VERIFY, Outcome, View


@flax.struct.dataclass
class OracleState:
    """State of `OracleDraftLength`.

    Attributes:
      plan: [B, positions] int32, drafts to make behind so many emitted tokens; the host sets it (`tracing.Replay`).
      position: [B] tokens emitted so far.
    """

    plan: jax.Array
    position: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleDraftLength:
    """Replays a plan, which is data: one program serves every trace.

    Where a run leaves the plan's path (rounding may tip a near tie) it meets positions without a plan, decodes them
    plainly, and is on the path again at the next position that has one. Verification decides what is emitted, always.

    Attributes:
      d_max: most drafts a row may hold; a longer plan is cut.
      positions: tokens a request may emit; None: as many as the engine's slots hold.
    """

    d_max: int = 16
    positions: int | None = dataclasses.field(default=None, metadata={"option": False})

    def __post_init__(self) -> None:
        if not 1 <= self.d_max <= MOST_DRAFTS:
            raise ValueError(f"d_max: {self.d_max}, expected 1 to {MOST_DRAFTS}")

    def init(self, batch: int) -> OracleState:
        assert self.positions is not None
        return OracleState(jnp.zeros((batch, self.positions), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def decide(self, state: OracleState, view: View) -> jax.Array:
        at = jnp.minimum(state.position, state.plan.shape[1] - 1)
        planned = jnp.take_along_axis(state.plan, at[:, None], axis=1)[:, 0]
        wants = view.drafted < jnp.minimum(planned, view.limit)
        return jnp.where(wants, DRAFT, VERIFY).astype(jnp.int32)

    def update(self, state: OracleState, outcome: Outcome) -> OracleState:
        return dataclasses.replace(state, position=state.position + outcome.emitted)

    def forget(self, state: OracleState, rows: jax.Array) -> OracleState:
        return OracleState(jnp.where(rows[:, None], 0, state.plan), jnp.where(rows, 0, state.position))
