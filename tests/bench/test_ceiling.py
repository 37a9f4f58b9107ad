"""bench.ceiling on a tiny model: every step is timed, every workload decoded, and the bound is worked by hand."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from aspire_jax import comparing
from bench import ceiling, machine, step_times
from tests.api import models


def test_all_figures(folder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "rates", lambda repeats=5: {"read_gb_s": 10.0, "matmul_gflop_s": 100.0})
    monkeypatch.setattr(ceiling, "use_compile_cache", lambda: None)
    # Few step shapes, and only workloads that share their programs: compiling is nearly all of it.
    monkeypatch.setattr(ceiling, "compare", functools.partial(comparing.compare, options=models.ASPIRE))
    arguments = ["--model", str(folder), "--data", *data, "--prompts", "2", "--context", "50", "--max-tokens", "4"]
    arguments += ["--workloads", "main", "random-tokens", "--quick", "--json", str(tmp_path / "x.json")]
    assert ceiling.command.run(ceiling.parser(), ceiling.measure, ceiling.draw, arguments) == 0
    results = json.loads((tmp_path / "x.json").read_text())
    steps = results["steps"]
    # Steps of a model this small are shorter than a busy machine's noise: their times are there, and of any sign.
    assert set(steps["verify"]) == {"1", "2", "3", "4", "5"}
    others = [steps[name] for name in ("draft", "first_draft", "plain_read_share")]
    assert np.isfinite([*steps["verify"].values(), *others]).all()
    assert [w["workload"] for w in results["workloads"]] == ["main", "random-tokens"]
    assert [w["exact"] for w in results["workloads"]] == [2, 2]
    bounds = {"ceiling", "ceiling_drafts", "ceiling_all_accepted"}
    assert [bounds & set(w) for w in results["workloads"]] == [bounds, set()]
    pytest.importorskip("matplotlib")
    ceiling.draw(results, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_the_bound():
    # One draft: half of the drafts accepted, 1.5 tokens for 0.25 + 1.0 plain steps. Two: 1.75 for 0.25 + 0.25 + 2.
    times = {"plain": 1.0, "first_draft": 0.25, "draft": 0.25, "verify": {1: 1.0, 2: 1.0, 3: 2.0}}
    assert step_times.ceiling(times, [0.5]) == (pytest.approx(1.5 / 1.25), 1)
    # Every draft accepted: 2 / 1.25 with one draft, 3 / 2.5 with two.
    assert step_times.ceiling(times, [1.0]) == (pytest.approx(1.6), 1)
    assert step_times.ceiling({**times, "verify": {1: 1.0, 2: 3.0}}, [0.5]) == (1.0, 0)
