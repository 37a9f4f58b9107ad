"""The studies on hand-made traces, where the right numbers are known."""

from __future__ import annotations

import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import model, rope
from aspire_jax.errors import InputError
from aspire_jax.tracing import Trace
from bench import schedulers
from bench.simulation import machine
from bench.studies import __main__ as studies
from bench.studies import (
    accepted_length,
    attention,
    constants,
    draft_length,
    oracle_gap,
    recall,
    refresh_layer,
    replays,
    stale_costs,
)
from bench.studies.attention import Attention
from bench.studies.runs import PAGE, Runs, Sizes
from tests.aspire_jax import tiny
from tests.bench.made import trace

D_MAX = replays.ASPIRE.d_max


def runs(*traces: Trace, **sizes: Any) -> Runs:
    """What the studies are made from, without a model."""
    return Runs("no model", [], traces, Sizes(quick=True, **{"steps": 300, **sizes}), lambda _: None)


def constant(accepted: int) -> Trace:
    """Every draft up to `accepted` is accepted, at every position of two requests."""
    return trace(np.full((2, 3 * D_MAX), accepted), d_max=D_MAX)


def test_rounds_go_on_behind_what_was_accepted() -> None:
    """From 1: 2 accepted, on to 4; from 4: none, to 5; from 5: 4, to 10; from 10: 1, to 12; from 12: 3, to the end."""
    accepted = np.array([[2, 9, 9, 0, 4, 9, 9, 9, 9, 1, 9, 3], [0] * 12])
    accepted[accepted == 9] = 4
    made = trace(accepted)
    assert accepted_length.rounds(made, 0) == [2, 0, 4, 1, 3]
    assert accepted_length.rounds(made, 1) == [0] * 12
    found = accepted_length.measure(runs(made))
    assert (found["least"], found["most"], found["mean"]) == (0, 2, 1)
    # Squared distances from 2 are 0, 4, 4, 1 and 1; the other request has none.
    assert found["deviation_of_rounds"] == pytest.approx(np.sqrt(10 / 5) / 2)
    assert found["deviation_of_requests"] == 1
    assert found["paper"]["mean"] == 11.51


def test_a_trace_without_full_drafts_is_refused() -> None:
    made = trace(np.zeros((1, 12), np.int64))
    made.drafted[:] = 3
    with pytest.raises(InputError, match="expected answers longer than d_max"):
        accepted_length.measure(runs(made))


def test_hindsight_of_rejected_drafts_is_plain_decoding() -> None:
    found = oracle_gap.measure(runs(constant(0)))
    assert len(found["cells"]) == 6
    for cell in found["cells"]:
        assert cell["speedup"]["hindsight"] == pytest.approx(1, abs=2e-3)
        for name, gap in cell["gap"].items():
            assert gap == pytest.approx(1 - cell["speedup"][name] / cell["speedup"]["hindsight"])
            assert 0 < gap < 0.5
    assert found["cells"][2]["paper"] == {"speedup": {"hindsight": 1.95, "aspire": 1.86}, "gap": 0.047}
    assert found["paper_mean_gap"] == pytest.approx(0.104, abs=1e-3)


def test_hindsight_of_accepted_drafts_by_hand() -> None:
    """17 tokens for 16 drafts and a verification of 17, against 17 plain steps."""
    found = oracle_gap.measure(runs(constant(D_MAX)))
    (cell,) = [c for c in found["cells"] if (c["model"], c["workload"]) == ("Qwen3-8B", "LB-v2[30k-40k]")]
    step, token, read, pair = machine.mixed_coefficients("LB-v2[30k-40k]", "Qwen3-8B").astype(float)
    length, rows = machine.context("LB-v2[30k-40k]", "Qwen3-8B"), cell["batch"]
    draft = step + rows * (token + (read + pair) * machine.selected(length))
    verify = step + rows * (17 * token + (read + 17 * pair) * length)
    plain = step + rows * (token + (read + pair) * length)
    assert cell["speedup"]["hindsight"] == pytest.approx(17 * plain / (16 * draft + verify), rel=5e-3)
    assert cell["speedup"]["aspire"] < cell["speedup"]["hindsight"]


def test_constants_where_all_drafts_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is right to begin with trust: a low alpha_0 costs, and the default is at one."""
    monkeypatch.setattr(constants, "VALUES", {"aspire": {"alpha_0": (0.5, 0.9, 0.9)}, "adaptive": {}})
    found = constants.measure(runs(constant(D_MAX)))
    rows = {r["value"]: r for r in found["rows"]}
    assert rows[0.9]["default"] and set(rows[0.9]["to_default"].values()) == {1.0}
    assert rows[0.5]["mean"] < 0.98
    assert len(rows[0.5]["to_default"]) == 1 + len(schedulers.SETTINGS)
    assert [p["to_default"] for p in found["paper_w"]] == pytest.approx(
        [1650 / 1501, 1599 / 1501, 1, 1731 / 1501, 1628 / 1501]
    )


def test_a_wrong_cost_matters_as_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is accepted, a step believed dear makes drafts look like verifications, and that costs speed."""
    monkeypatch.setattr(stale_costs, "FACTORS", (1.0, 8.0))
    monkeypatch.setattr(replays, "POLICIES", {"aspire": replays.ASPIRE})
    found = stale_costs.measure(runs(constant(D_MAX)))
    assert [(p["fitted"], p["stale"]) for p in found["paper"]] == [(2.16, 2.21), (2.07, 1.51)]
    by = {row["term"]: row["to_true"] for row in found["wrong_by"]}
    assert by["the step's constant"][0] == 1.0 and by["the step's constant"][1] < 0.97
    assert by["reading a context token"][0] == 1.0
    for case in found["cases"]:
        assert case["batch"] in (54, 64) and min(case["speedup"].values()) > 1
        # The fit learns the machine, so it ends nearer to the true costs' speed than to ruin.
        assert case["speedup"]["fitted while decoding"] == pytest.approx(case["speedup"]["fitted"], rel=0.15)


def test_from_traces_to_json_and_pictures(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    constant(3).save(tmp_path / "trace.npz")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    given = ["--only", "accepted_length", "oracle_gap", "--traces", str(tmp_path / "trace.npz"), "--quick"]
    assert studies.main([*given, "--json", str(tmp_path / "out.json"), "--plot", str(pictures)]) == 0
    assert sorted(p.name for p in pictures.iterdir()) == ["accepted_length.png", "oracle_gap.png"]
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found["studies"]) == ["accepted_length", "oracle_gap"] and found["model"] == "m"
    assert found["studies"]["accepted_length"]["mean"] == 3
    assert "mean accepted length of a request: 3.00" in capsys.readouterr().out
    studies.draw(found, str(tmp_path / "all.svg"))
    assert (tmp_path / "all.svg").stat().st_size > 10_000


def test_bad_input_is_one_line(tmp_path, capsys) -> None:
    assert studies.main(["--only", "nothing"]) == 2
    assert "--only: nothing, expected some of accepted_length, " in capsys.readouterr().err
    assert studies.main(["--traces", str(tmp_path / "none.npz")]) == 2
    assert "expected a trace (npz)" in capsys.readouterr().err
    assert studies.main(["--plot", str(tmp_path / "none" / "x.png")]) == 2
    assert "expected a folder that exists" in capsys.readouterr().err


def uniform(layers: int, tokens: int, pages: int) -> Attention:
    """Attention of which every page gets as much."""
    by_head = np.full((layers, tokens, 2, pages), 1 / pages, np.float32)
    window = np.full((layers, 2, pages * PAGE), 1 / (pages * PAGE), np.float32)
    window[..., -8:] = 0
    return Attention(by_head, by_head.mean(axis=2), window, pages * PAGE - 8)


def test_recall_of_uniform_attention_is_the_share_of_pages() -> None:
    a = uniform(4, 20, 8)
    np.testing.assert_allclose(recall.by_lag(a, 2), 2 / 8, rtol=1e-6)
    np.testing.assert_allclose(recall.by_distance(a, 2), np.full(3, 2 / 8), rtol=1e-6)
    found = recall.by_source(a, tiny.config(heads=4, layers=4, kv=2), 2)
    snap = found.pop("snapkv, at the prompt's end")
    for name, value in found.items():
        np.testing.assert_allclose(value, 2 / 8, rtol=1e-6, err_msg=name)
    # Two pages of 16 tokens less a window of 16 is one page, and the page that the window begins in.
    np.testing.assert_allclose(snap, 2 / 8, rtol=1e-6)


def test_recall_by_hand() -> None:
    """Token t looks at page t + 1 alone in layer 0, and at page 0 alone in the others."""
    tokens, pages = 20, 32
    by_head = np.zeros((4, tokens, 2, pages), np.float32)
    for t in range(tokens):
        by_head[0, t, :, t + 1] = 1
    by_head[1:, :, :, 0] = 1
    a = uniform(4, tokens, pages)._replace(by_head=by_head, score=by_head.mean(axis=2))
    # Layer 0 never finds its page again, three layers always do. Ties go to the first page, so one page is asked for.
    np.testing.assert_allclose(recall.by_lag(a, 1), [1, *[3 / 4] * (len(recall.LAGS) - 1)])
    # Of layers 2 and 3: the same layer's page, one layer before (1 and 2), two before (0 and 1).
    np.testing.assert_allclose(recall.by_distance(a, 1), [1, 1, 1 / 2])
    found = recall.by_source(a, tiny.config(heads=4, layers=4, kv=2), 2)
    np.testing.assert_allclose(found["streaming: first and last pages"], [0, 1, 1, 1])
    np.testing.assert_allclose(found["refresh layer N-2, token before"], [0, 1, 1, 1])


def test_attention_is_the_models() -> None:
    """The weights, applied to the values in a forward of our own, are checked through the model's logits elsewhere;
    here: they are those of the reference's attention, layer by layer, and pages cover what was asked for."""
    c = tiny.config(kv=1)
    params = tiny.weights(c)
    tokens = np.asarray(tiny.prompts([40])[0], np.int32)
    loaded: Any = types.SimpleNamespace(config=c, params=tiny.unstacked(c))
    got = attention.measured(loaded, tokens[:34], tokens[34:], 4, 8)
    assert got.by_head.shape == (2, 6, 1, 8) and got.score.shape == (2, 6, 8) and got.start == 26
    cos_sin = rope.rotation(c.rope, c.head_dim, c.max_length, jnp.arange(40))
    x = params["embed"][tokens]
    for layer in range(2):
        weights = model.layer_of(params, layer)
        q, k, v = model.project(c, weights, x, cos_sin)
        scores = jnp.einsum("qhgd,khd->qhgk", q, k) * np.float32(c.head_dim**-0.5)
        causal = (np.arange(40)[:, None] >= np.arange(40)[None])[:, None, None]
        w = np.asarray(jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1))
        pages = w[34:, :, :, :32].reshape(6, 1, 3, 8, 4)
        np.testing.assert_allclose(got.by_head[layer], pages.sum(axis=-1).mean(axis=2), atol=1e-5)
        np.testing.assert_allclose(got.score[layer], pages.max(axis=(1, 2)).sum(axis=-1), atol=1e-5)
        np.testing.assert_allclose(got.window[layer, 0, :26], w[26:34, 0, :, :26].mean(axis=(0, 1)), atol=1e-5)
        assert not got.window[layer, :, 26:].any()
        x = model.finish(c, weights, x, jnp.einsum("qhgk,khd->qhgd", w, v))


def test_the_papers_positions() -> None:
    assert refresh_layer.positions(30) == {"0": 0, "N/4": 7, "N/2": 15, "3N/4": 22, "N-2": 28, "N-1": 29}


def test_studies_of_a_model_end_to_end(folder, data, tmp_path, capsys, monkeypatch) -> None:
    """A tiny model: every study that decodes, from prompts to JSON and one picture."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(draft_length, "QUICK", (5,))
    monkeypatch.setattr(refresh_layer, "QUICK", ("N/2", "N-2"))
    names = ["draft_length", "refresh_layer", "page_size", "recall"]
    sizes = ["--context", "55", "--prompts", "2", "--max-tokens", "24", "--budget", "32"]
    output = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "all.png")]
    given = ["--quick", "--model", str(folder), "--data", *data, *sizes, "--only", *names]
    assert studies.main([*given, *output]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out.json").read_text())
    of = found["studies"]
    assert [r["drafts"] for r in of["draft_length"]["rows"]] == [5]
    assert [r["position"] for r in of["refresh_layer"]["rows"]] == ["N/2", "N-2"]
    assert [r["page_size"] for r in of["page_size"]["rows"]] == [4, 16]
    # One run serves the studies that have it in common.
    assert of["draft_length"]["rows"][0]["refreshed"]["all"] == of["refresh_layer"]["rows"][1]["all"]
    assert of["refresh_layer"]["rows"][1]["all"] == of["page_size"]["rows"][1]["all"]
    for row in of["recall"]["by_source"]:
        assert 0 < row["recall"] <= 1 + 1e-6 and len(row["by_layer"]) == 2
    lags = [r["recall"] for r in of["recall"]["by_lag"]]
    assert lags[0] > max(lags) - 0.02 and lags[-1] < lags[0]
    assert found["answers_that_differ"] == 0
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_traces_are_recorded_where_none_are_given(folder, data) -> None:
    sizes = Sizes(requests=2, context=50, positions=12, d_max=4, budget=32)
    made = Runs(str(folder), data, [], sizes, lambda _: None)
    found = accepted_length.measure(made)
    assert found["drafts"] == [4] and len(found["requests"]) == 2
    (kept,) = made.traces
    assert kept.meta["cadence"] == "every" and kept.meta["options"]["k_min"] == 2
    assert made.acceptances(3).run.shape[1] >= 12 and made.acceptances(3).run.max() <= 3
