"""A request in a slot, and the completion that is made of what the slot holds when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from aspire_jax.engine import STOP, State
from aspire_jax.request import Prepared
from aspire_jax.results import Completion, Stats, TokenLogprob
from aspire_jax.transcript import Transcript


@dataclasses.dataclass
class Row:
    """A request in a slot."""

    request: Prepared
    transcript: Transcript
    seen: int = 0  # tokens taken from the slot's output buffer
    stats: Stats = dataclasses.field(
        default_factory=lambda: Stats(steps=0, drafted=0, accepted=0, verifications=0, emitted=0)
    )


def completion(row: Row, reason: int, slots: Mapping[str, np.ndarray], state: State, slot: int) -> Completion:
    """The completion of an ended request. `slots`: host copies of the slots' arrays by name; `reason`: the slot's."""
    answer, request = row.transcript, row.request
    return Completion(
        id=request.id,
        index=request.index,
        choice=request.choice,
        seed=request.sampling.seed,
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason="stop" if answer.stopped or reason == STOP else "length",
        prompt_tokens=len(request.tokens),
        stats=row.stats,
        margins=slots["margin"][slot, : len(answer.token_ids)].copy(),
        rounds=_rounds(slots["held"][slot, : row.seen]),
        logprobs=_logprobs(answer.token_ids, state, slot, request.sampling.logprobs),
    )


def _rounds(held: np.ndarray) -> np.ndarray:
    """Drafts held and tokens emitted by each verification [n, 2], from the slot's record of its tokens."""
    first = np.flatnonzero(held >= 0)
    return np.stack([held[first].astype(int), np.diff(first, append=len(held))], axis=1)


def _logprobs(tokens: list[int], state: State, slot: int, best: int | None) -> list[TokenLogprob] | None:
    """Log-probabilities of an answer's tokens out of the slot's buffers, with `best` alternatives each."""
    if best is None or state.sampling is None:
        return None
    buffers = (state.sampling.logprob, state.sampling.best_token, state.sampling.best_logprob)
    # Whole buffers: to cut a slot out on the device would be another program.
    own, ids, values = (np.array(x)[slot, : len(tokens)].tolist() for x in buffers)
    return [
        TokenLogprob(token_id=token, logprob=own[i], best=tuple(zip(ids[i][:best], values[i][:best], strict=True)))
        for i, token in enumerate(tokens)
    ]
