"""Loops are told from new text, and drafts are counted where their verification began."""

from __future__ import annotations

import numpy as np

from aspire_jax.results import Completion, Stats
from bench import novelty


def test_new_text_is_novel_and_a_loop_is_not():
    text = list(range(20))
    assert novelty.novel(text).tolist() == [True] * 17 + [False] * 3  # too little is left to tell
    loop = list(range(20)) * 2
    found = novelty.novel(loop)
    # From place 10 on: 10 grams, those from 20 on are repeats, and grams 17, 18, 19 cross into the loop and are new.
    # At 13 there are 3 repeats of 10 (20, 21, 22): novel; at 14 four: not.
    assert found[:14].all() and not found[14:].any()
    assert not novelty.novel([1, 2, 3]).any()


def test_a_loop_inside_the_span_counts():
    assert not novelty.novel([5] * 30)[1:].any()


def test_drafts_are_counted_at_the_places_of_their_verifications():
    tokens = list(range(20)) * 2
    # Verifications at 0 (nothing held), 1 (4 held, 2 accepted), 4 (3 held, all accepted), ..., 20 (5 held, 1 accepted).
    rounds = [(0, 1), (4, 3), (3, 4), (0, 12), (5, 2), (2, 3)]
    stats = Stats(steps=1, drafted=14, accepted=8, verifications=6, emitted=25)
    answer = Completion(
        id=0, index=0, text="", token_ids=tokens[:25], finish_reason="length", prompt_tokens=1, stats=stats,
        margins=np.zeros(25, np.float32), rounds=np.array(rounds),
    )  # fmt: skip
    assert novelty.counted([answer], only_novel=False) == (14, 2 + 3 + 1 + 2, 3 + 4 + 2 + 3, 4)
    assert novelty.counted([answer], only_novel=True) == (7, 5, 7, 2)  # those at 1 and 4
