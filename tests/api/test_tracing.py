"""Traces over a real stream: recorded, written, read, refused, and replayed by the oracle with equal answers."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

import aspire_jax
from aspire_jax import InputError, Method, Request, tracing
from aspire_jax.comparing import compare
from aspire_jax.context import RefreshContext
from aspire_jax.draft_length import OracleDraftLength
from aspire_jax.request import prepare

OPTIONS = {"k_min": 2, "recent": 1, "rho": 0.0}
NEW, D_MAX = 40, 3


@pytest.fixture(scope="module")
def requests(prompts):
    return [Request(token_ids=p, ignore_eos=True, id=f"r{i}") for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def trace(model, requests):
    return tracing.record(model, requests, method="oracle", options=OPTIONS, d_max=D_MAX, max_tokens=NEW, slots=3)


def test_a_trace_has_every_request_over_refilled_slots(trace, prompts, plain):
    assert trace.ids.tolist() == [f"r{i}" for i in range(7)]
    assert trace.prompt_tokens.tolist() == [len(p) for p in prompts]
    assert trace.tokens.tolist() == [c.token_ids for c in plain] and trace.emitted.tolist() == [NEW] * 7
    assert trace.meta["method"] == "oracle" and trace.meta["context"] == "RefreshContext"
    assert trace.meta["options"] == {**OPTIONS, "layers": None, "renew": "verification"}
    assert (trace.d_max, trace.meta["page_size"], trace.meta["cadence"]) == (D_MAX, 16, "accepted")
    assert set(trace.meta["versions"]) == {"aspire-jax", "jax", "numpy"}
    assert (trace.accepted < trace.drafted).sum() > 10 and trace.accepted.sum() > 10
    assert np.isnan(trace.outside).all()  # refreshed at verification, no layer reads everything while drafting
    made = np.arange(D_MAX) < trace.drafted[:, None]
    for name in ("top_probability", "margin", "entropy", "recall"):
        assert (np.isfinite(getattr(trace, name)) == made).all()


def test_written_and_read(trace, tmp_path):
    trace.save(tmp_path / "t.npz")
    again = tracing.load(tmp_path / "t.npz")
    for field in dataclasses.fields(trace):
        a, b = getattr(trace, field.name), getattr(again, field.name)
        np.testing.assert_array_equal(a, b) if field.name != "meta" else None
        assert field.name != "meta" or a == b
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


def test_the_oracle_drafts_nothing_that_is_rejected(model, requests, trace, plain):
    done = aspire_jax.generate(model, requests, method="oracle", trace=trace, max_tokens=NEW, slots=3)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    for i, c in enumerate(done):
        mine = trace.accepted[trace.request == i]
        assert c.stats.drafted == c.stats.accepted == mine.sum()
        assert c.stats.verifications == NEW - mine.sum()


def test_refreshed_at_every_draft_too_and_with_stops(model, prompts, plain):
    """Each request stops at a token in the middle of its answer; the method is the user's own."""
    requests = [
        Request(token_ids=p, ignore_eos=True, stop_token_ids=[c.token_ids[20 + i]])
        for i, (p, c) in enumerate(zip(prompts[3:6], plain[3:6], strict=True))
    ]
    context = RefreshContext(k_min=2, recent=1, rho=0.0, renew="step")
    mine = Method(context, OracleDraftLength(d_max=2))
    trace = tracing.record(model, requests, method=mine, d_max=2, max_tokens=NEW)
    assert np.isfinite(trace.outside[:, 0]).all() and (trace.outside[:, 0] > 0).any()
    done = aspire_jax.generate(model, requests, method=mine, trace=trace, max_tokens=NEW)
    for i, (c, p) in enumerate(zip(done, plain[3:6], strict=True)):
        end = p.token_ids.index(p.token_ids[20 + i]) + 1
        assert c.token_ids == p.token_ids[:end] == trace.tokens[i, :end].tolist() and c.finish_reason == "stop"
        assert c.stats.drafted == c.stats.accepted == trace.accepted[trace.request == i].sum()


def test_a_wrong_plan_costs_steps_and_no_token(model, requests, trace, plain):
    rng = np.random.default_rng(0)
    wrong = dataclasses.replace(trace, accepted=rng.integers(0, trace.drafted + 1).astype(np.int32))
    done = aspire_jax.generate(model, requests, method="oracle", trace=wrong, max_tokens=NEW, slots=3)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert sum(c.stats.drafted - c.stats.accepted for c in done) > 0


def test_compare_records_by_itself(model, requests):
    prepared = prepare(model, requests[2:5], max_tokens=NEW)
    found = compare(model, prepared, candidate="oracle", options={**OPTIONS, "d_max": D_MAX}, rounds=2)
    assert found.exact == 3 and not found.differences
    for report in found.candidate_reports:
        assert report.drafted == report.accepted > 0 and report.prefilled == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trace": None}, "trace: missing, expected one of these prompts: method oracle replays it"),
        ({"trace": "every"}, "trace: cadence 'every', expected 'accepted'"),
        ({"method": "aspire"}, "trace: given, expected only with method oracle"),
        ({"options": {"k_min": 3}}, "k_min: 3, expected the trace's 2"),
        (
            {"prompts": [Request(token_ids=[5, 6], id="r9")]},
            "trace: no request 'r9' of 2 tokens, expected every one of",
        ),
        ({"prompts": [Request(token_ids=[5, 6, 7], id="r0")]}, "trace: no request 'r0' of 3 tokens"),
    ],
)
def test_refused_before_any_work(model, requests, trace, arguments, message):
    given = {"prompts": requests, "method": "oracle", "trace": trace, **arguments}
    if given["trace"] == "every":
        given["trace"] = dataclasses.replace(trace, meta={**trace.meta, "cadence": "every"})
    with pytest.raises(InputError, match=re.escape(message)):
        aspire_jax.generate(model, given.pop("prompts"), max_tokens=NEW, **given)


def test_what_selects_nothing_cannot_be_recorded(model, requests):
    with pytest.raises(ValueError, match="method: NoContext selects no context, expected one that can draft"):
        tracing.record(model, requests, method="autoregressive")


BAD = {
    "text": (None, "not a readable npz file"),
    "missing array": (lambda a, m: a.pop("margin"), "margin: missing, expected a trace of format 1"),
    "format": (lambda a, m: m.update(format=2), "meta: format 2, expected 1"),
    "d_max": (lambda a, m: m.update(d_max="3"), "meta: d_max '3', expected int"),
    "cadence": (lambda a, m: m.update(cadence="x"), "meta: cadence 'x', expected accepted or every"),
    "shape": (lambda a, m: a.update(draft=a["draft"][:, 1:]), r"draft: shape \(\d+, 2\), expected \[N, d_max\]"),
    "dtype": (lambda a, m: a.update(accepted=a["accepted"] * 1.0), "accepted: float64, expected int32"),
    "value": (lambda a, m: a["accepted"].__setitem__(3, 9), r"accepted\[3\]: 9, expected 0 to drafted"),
    "request": (lambda a, m: a["request"].__setitem__(-1, 7), r"request\[\d+\]: 7, expected 0 to 6"),
    "order": (lambda a, m: a["position"].__setitem__(1, 0), r"position\[1\]: 0, expected starts ordered"),
    "length": (lambda a, m: a["length"].__setitem__(2, 0), r"length\[2\]: 0, expected prompt_tokens - 1 \+ position"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_broken_file_is_refused_in_one_line(trace, tmp_path, change, message):
    file = tmp_path / "t.npz"
    trace.save(file)
    with np.load(file) as read:
        arrays = {name: read[name].copy() for name in read.files}
    meta = json.loads(str(arrays["meta"]))
    if change is None:
        file.write_text("no archive")
    else:
        change(arrays, meta)
        np.savez(file, **{**arrays, "meta": np.array(json.dumps(meta))})
    with pytest.raises(InputError, match=f"^{re.escape(str(file))}: {message}") as refused:
        tracing.load(file)
    assert "\n" not in str(refused.value)


def test_no_file_at_all(tmp_path):
    with pytest.raises(InputError, match=r"none.npz: No such file or directory, expected a trace \(npz\)"):
        tracing.load(tmp_path / "none.npz")
