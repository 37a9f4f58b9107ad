"""Comparison of two methods over one prefill: what counts as equal, as a near tie, as a defect."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aspire_jax.comparing import NEAR_TIE, bit_differences, compare, differences, in_turns
from aspire_jax.request import Request, prepare
from aspire_jax.results import Completion, Stats
from aspire_jax.sizing import engine_for
from tests.api import models


def test_both_methods_decode_from_one_prefill(model, prompts, plain):
    requests = prepare(model, [Request(token_ids=p, ignore_eos=True) for p in prompts[2:5]], max_tokens=40)
    told = []
    found = compare(
        model, requests, options=models.ASPIRE, rounds=2, progress=lambda name, r: told.append((name, r.stage))
    )
    assert found.exact == 3 and found.differences == found.defects == []
    assert [c.token_ids for c in found.candidate] == [c.token_ids for c in plain[2:5]]
    assert [len(r) for r in (found.reference_reports, found.candidate_reports)] == [2, 2]
    prefilled = [r.prefilled for r in (*found.reference_reports, *found.candidate_reports)]
    assert prefilled == [sum(len(p) - 1 for p in prompts[2:5]), 0, 0, 0]
    assert found.speedup > 0 and found.prefill.prefill_seconds > 0
    assert ("autoregressive", "prefill") in told and ("aspire", "prefill") not in told


def test_several_engines_take_one_cache_over_in_turns(model, prompts, plain):
    requests = prepare(model, [Request(token_ids=p, ignore_eos=True) for p in prompts[2:5]], max_tokens=40)
    methods = {"autoregressive": ("autoregressive", None), "drafts": (models.DRAFTS, None)}
    methods["aspire"] = ("aspire", models.ASPIRE)
    engines = {
        name: engine_for(model, requests, method=method, slots=3, options=options)
        for name, (method, options) in methods.items()
    }
    short = [dataclasses.replace(r, max_new=2) for r in requests]
    warm, cache, fit = in_turns(model, short, engines)
    assert [run.report.prefilled > 0 for (run,) in warm.values()] == [True, False, False]
    runs, _, _ = in_turns(model, requests, engines, rounds=2, cache=cache, fit=fit)
    assert list(runs) == list(engines) and {len(each) for each in runs.values()} == {2}
    for run in (run for each in runs.values() for run in each):
        assert [a.token_ids for a in run.answers] == [a.token_ids for a in plain[2:5]] and run.report.prefilled == 0
        assert [sum(a.tokens for a in run.arrivals if a.index == i) for i in range(3)] == [40, 40, 40]
        assert all(0 < a.decoding <= a.waiting for a in run.arrivals) and run.report.work[0] == run.report.steps
        # Every run of steps once, though each row has a part of it.
        assert sum({a.decoding for a in run.arrivals}) == pytest.approx(run.report.decode_seconds)


def answer(tokens: list[int], margins: list[float]) -> Completion:
    stats = Stats(steps=1, drafted=0, accepted=0, verifications=1, emitted=1)
    fields = {"id": 0, "index": 0, "text": "", "finish_reason": "length", "prompt_tokens": 1, "stats": stats}
    return Completion(token_ids=tokens, margins=np.asarray(margins, np.float32), **fields)


@pytest.mark.parametrize(
    ("tokens", "margins", "expected"),
    [
        ([1, 2, 3], [1.0, 1.0, 1.0], None),
        ([1, 5, 9], [1.0, 1e-5, 1.0], (1, True)),
        ([1, 5, 9], [1.0, 0.5, 1.0], (1, False)),
        ([5, 2, 3], [1e-5, 1.0, 1.0], (0, False)),  # the reference was sure of its own
        ([1, 2], [1.0, 1.0], (2, False)),  # one goes on where the other ends
    ],
)
def test_differences(tokens, margins, expected):
    reference = answer([1, 2, 3], [1.0, 1e-4, 1.0])
    found = differences([reference], [answer(tokens, margins)], NEAR_TIE["float32"])
    assert [(d.position, d.near_tie) for d in found] == ([] if expected is None else [expected])


def test_differences_keep_the_index():
    other = dataclasses.replace(answer([7], [1.0]), index=4)
    same = answer([1], [1.0])
    (d,) = differences([same, dataclasses.replace(same, index=4)], [same, other], 1e-3)
    assert d.index == 4


@pytest.mark.parametrize(
    ("tokens", "margins", "position"),
    [
        ([1, 2, 3], [1.0, 1e-4, 1.0], None),
        ([1, 5, 3], [1.0, 1e-4, 1.0], 1),
        ([1, 2, 3], [1.0, 1e-4, np.nextafter(np.float32(1), np.float32(2))], 2),  # the same tokens, another last bit
        ([1, 2], [1.0, 1e-4], 2),
    ],
)
def test_bit_differences(tokens, margins, position):
    found = bit_differences([answer([1, 2, 3], [1.0, 1e-4, 1.0])], [answer(tokens, margins)])
    assert [(d.position, d.near_tie) for d in found] == ([] if position is None else [(position, False)])
