"""Recording: every row drafts as far as it may, and what became of every draft is kept (see `aspire_jax.tracing`)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.draft_length.interface import MOST_DRAFTS, Outcome, Signals, View, in_step


@flax.struct.dataclass
class Record:
    """What is known of each row's drafts, by the number of tokens its request had emitted when they began.

    Attributes:
      position: [B] tokens emitted so far; held: [B] drafts made since the last verification.
      drafted, accepted: [B, positions] int32, -1 where no draft began.
      token: [B, positions, d_max] int32, -1 where none was drafted.
      signals: of those drafts, each [B, positions, d_max] float32.
      recall: [B, positions, d_max] float32.
    """

    position: jax.Array
    held: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    token: jax.Array
    signals: Signals
    recall: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordDraftLength:
    """Drafts to `d_max`, verifies, and keeps what it is told, in buffers that the host reads.

    Attributes:
      d_max: drafts before each verification, fewer only near a request's end.
      cadence: "accepted" goes on behind the accepted drafts, as any method does. "every" emits one token a
        verification and drops the other drafts, so that a draft begins behind every token of the answer.
      positions: tokens a request may emit, the size of the buffers; None: as many as the engine's slots hold.
    """

    d_max: int = 16
    cadence: Literal["accepted", "every"] = "accepted"
    positions: int | None = dataclasses.field(default=None, metadata={"option": False})

    def __post_init__(self) -> None:
        if not 1 <= self.d_max <= MOST_DRAFTS:
            raise ValueError(f"d_max: {self.d_max}, expected 1 to {MOST_DRAFTS}")
        if self.cadence not in ("accepted", "every"):
            raise ValueError(f"cadence: {self.cadence!r}, expected accepted or every")

    @property
    def signals(self) -> tuple[str, ...]:
        """All of them."""
        return Signals._fields

    @property
    def instrumented(self) -> bool:
        """A verification also measures `Outcome.recall`, and scores pages by tokens that are emitted alone."""
        return True

    @property
    def most_emitted(self) -> int | None:
        """Tokens a verification may emit."""
        return 1 if self.cadence == "every" else None

    def init(self, batch: int) -> Record:
        assert self.positions is not None
        starts, drafts = (batch, self.positions), (batch, self.positions, self.d_max)
        unknown = jnp.full(drafts, np.nan, jnp.float32)
        return Record(
            position=jnp.zeros((batch,), jnp.int32),
            held=jnp.zeros((batch,), jnp.int32),
            drafted=jnp.full(starts, -1, jnp.int32),
            accepted=jnp.full(starts, -1, jnp.int32),
            token=jnp.full(drafts, -1, jnp.int32),
            signals=Signals(*(unknown,) * len(Signals._fields)),
            recall=unknown,
        )

    def decide(self, state: Record, view: View) -> jax.Array:
        return in_step(view.active & (view.drafted < view.limit))

    def update(self, state: Record, outcome: Outcome) -> Record:
        batch = state.position.shape[0]
        row = jnp.arange(batch, dtype=jnp.int32)
        held = jnp.where(outcome.drafted, state.held, self.d_max)  # out of range: dropped
        measured = outcome.verified & (outcome.drafts > 0)
        start = jnp.where(measured, state.position, state.drafted.shape[1])

        def keep(buffer: jax.Array, value: jax.Array) -> jax.Array:
            return buffer.at[row, state.position, held].set(value, mode="drop")

        assert outcome.recall is not None
        made = jnp.arange(self.d_max, dtype=jnp.int32)[None] < outcome.drafts[:, None]
        recall = jnp.where(made, outcome.recall, np.float32(np.nan))
        return Record(
            position=state.position + outcome.emitted,
            held=jnp.where(outcome.verified, 0, state.held + outcome.drafted.astype(jnp.int32)),
            drafted=state.drafted.at[row, start].set(outcome.drafts, mode="drop"),
            accepted=state.accepted.at[row, start].set(outcome.accepted, mode="drop"),
            token=keep(state.token, outcome.token),
            signals=Signals(*(keep(b, v) for b, v in zip(state.signals, outcome.signals, strict=True))),
            recall=state.recall.at[row, start].set(recall, mode="drop"),
        )

    def forget(self, state: Record, rows: jax.Array) -> Record:
        blank = self.init(rows.shape[0])

        def reset(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(rows.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        return jax.tree.map(reset, state, blank)
