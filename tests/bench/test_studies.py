"""The studies on hand-made traces, where the right numbers are known."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from aspire_jax.errors import InputError
from aspire_jax.tracing import Trace
from bench import schedulers
from bench.simulation import machine
from bench.studies import __main__ as studies
from bench.studies import accepted_length, constants, oracle_gap, replays, stale_costs
from bench.studies.runs import Runs, Sizes
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
