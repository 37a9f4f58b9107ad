"""Draft-length policies: when does a row stop drafting and verify?

`interface.py` has what the engine and a policy say to each other; every other file is one policy.
"""

from __future__ import annotations

from aspire_jax.draft_length.adaptive import AdaptiveDraftLength, AdaptiveState
from aspire_jax.draft_length.aspire import AspireDraftLength, AspireState, expected_tokens
from aspire_jax.draft_length.fixed import FixedDraftLength
from aspire_jax.draft_length.fsm import FsmDraftLength, FsmState
from aspire_jax.draft_length.interface import (
    DRAFT,
    IDLE,
    MOST_DRAFTS,
    VERIFY,
    DraftLengthPolicy,
    Outcome,
    Signals,
    State,
    View,
    in_step,
    instrumented,
    most_emitted_of,
    pauses,
    signals_of,
)
from aspire_jax.draft_length.oracle import OracleDraftLength, OracleState
from aspire_jax.draft_length.paused import Paused
from aspire_jax.draft_length.plain import NoDraft
from aspire_jax.draft_length.record import Record, RecordDraftLength

__all__ = [
    "DRAFT",
    "IDLE",
    "MOST_DRAFTS",
    "VERIFY",
    "AdaptiveDraftLength",
    "AdaptiveState",
    "AspireDraftLength",
    "AspireState",
    "DraftLengthPolicy",
    "FixedDraftLength",
    "FsmDraftLength",
    "FsmState",
    "NoDraft",
    "OracleDraftLength",
    "OracleState",
    "Outcome",
    "Paused",
    "Record",
    "RecordDraftLength",
    "Signals",
    "State",
    "View",
    "expected_tokens",
    "in_step",
    "instrumented",
    "most_emitted_of",
    "pauses",
    "signals_of",
]
