"""Which verifications met new text. A small model's greedy answers often loop, and a loop flatters acceptance.

A place in an answer is novel where fewer than 34 % of the 4-grams in the 13 tokens from there on stood in the answer
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from aspire_jax.results import Completion

GRAM, SPAN, REPEATED = 4, 13, 0.34


class Drafts(NamedTuple):
    """Drafts verified, accepted, tokens emitted and verifications that held drafts."""

    drafted: int
    accepted: int
    emitted: int
    verifications: int


def novel(tokens: Sequence[int]) -> np.ndarray:
    """[len(tokens)] bool; places with fewer than 4 tokens left are not: there is nothing to tell by."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    first: dict[tuple[int, ...], int] = {}
    for place, gram in enumerate(grams):
        first.setdefault(gram, place)
    # A gram that begins inside the span may repeat one of the span itself: that is a loop too.
    repeated = np.array([first[gram] < place for place, gram in enumerate(grams)], bool)
    out = np.zeros(len(tokens), bool)
    for place in range(len(grams)):
        out[place] = repeated[place : place + SPAN - GRAM + 1].mean() < REPEATED
    return out


def counted(answers: Iterable[Completion], *, only_novel: bool) -> Drafts:
    """Sums over the verifications that held drafts; of those at novel places alone, or of all."""
    total = np.zeros(4, int)
    for answer in answers:
        places = novel(answer.token_ids) if only_novel else np.ones(len(answer.token_ids), bool)
        start = 0
        for held, emitted in answer.rounds.tolist():
            if held and start < len(places) and places[start]:
                total += (held, min(emitted - 1, held), emitted, 1)
            start += emitted
    return Drafts(*total.tolist())
