"""bench.gpu runs from end to end: tiny sizes, kernels interpreted. What it measures there means nothing."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import methods, params
from bench import gpu, gpu_plan, gpu_replay, gpu_steps, gpu_table
from bench.gpu_sizes import FULL, HEADLINE, TINY, WORKLOADS, Load
from bench.simulation import machine

NAME = "Qwen3-8B"


def test_the_script_runs_and_keeps_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--json", str(file), "--minutes", "30"]) == 0
    results = json.loads(file.read_text())
    assert results["errors"] == results["skipped"] == []
    assert all(case["ok"] for case in results["correctness"])
    assert {case["kind"] for case in results["bandwidth"]} == {"plain", "verify", "draft"}
    assert {step["kind"] for step in results["Qwen3-8B: steps"]["steps"]} == {
        "plain", "draft", "verify 3", "mixed: half verify 2",
    }  # fmt: skip
    # Every draft of the oracle is accepted: its plan is what the replay accepts.
    whole = results[f"{NAME}, {HEADLINE}: oracle"]
    assert whole["tokens_per_verification"] > 1
    assert whole["acceptance"] == 1
    out = capsys.readouterr().out
    assert f"{NAME}, {HEADLINE}: 2 rows, 32 tokens" in out
    # Another run goes on behind what is there: nothing is left to do, so nothing is timed again.
    assert gpu.main(["--tiny", "--json", str(file), "--minutes", "0", "--resume"]) == 0
    again = json.loads(file.read_text())
    assert again["skipped"] == []
    assert again[f"{NAME}, {HEADLINE}: oracle"] == whole


def test_a_run_without_time_says_what_it_skipped(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--json", str(file), "--minutes", "0"]) == 0
    results = json.loads(file.read_text())
    assert "correctness" in results["skipped"]
    assert f"{NAME}, {HEADLINE}: weights" in results["skipped"]


def test_what_cannot_be_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    file.write_text('{"machine": {"device": "another"}}')
    for arguments, message in (
        ([], "bench.gpu: error: device: cpu, expected a GPU (or --tiny, or --plan)\n"),
        (["--tiny", "--resume", "--json", str(file)], f"{file}: device 'another', expected 'cpu'\n"),
        (["--tiny", "--resume", "--json", str(tmp_path / "no")], "expected the results of an earlier run\n"),
    ):
        with pytest.raises(SystemExit) as stopped:
            gpu.main(arguments)
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert error.endswith(message)
        assert error.count("\n") == 1


@pytest.mark.parametrize("method", list(methods.METHODS))
def test_every_method_can_be_replayed(method: str) -> None:
    """Traced, not run: what the replay changes in the state fits every method's."""
    load = TINY.load(NAME, HEADLINE)
    engine = gpu_steps.configured(TINY, NAME, method, load)
    accepts = gpu_replay.runs_of(NAME, HEADLINE, method, load.batch, TINY.new)
    assert accepts.shape == (load.batch, TINY.new)
    state = gpu_replay.begun(engine, load, accepts, np.ones(4))
    weights = params.abstract(engine.config, jnp.float32)
    after = jax.eval_shape(functools.partial(gpu_replay.replay, engine), weights, state, 3, jnp.asarray(accepts))
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_the_prompt_of_snapkv_is_there() -> None:
    """Its selection depends on where the prompt ended: without it every page would count as generated."""
    load = Load(2, 96)
    engine = gpu_steps.configured(TINY, NAME, "magicdec-snapkv", load)
    state: Any = gpu_steps.started(engine, load.context).context
    assert np.asarray(state.window).tolist() == [65, 65]  # the last 32 tokens of 97
    mass = np.asarray(state.mass)
    assert (mass[..., :4] > 0).all()
    assert (mass[..., 5:] == 0).all()


def test_the_plan_covers_table_1_and_begins_with_what_tells_most() -> None:
    stages = list(gpu_plan.stages(FULL))
    cells = [(s.model, s.workload, m) for s in stages for m in s.methods]
    assert len(cells) == len(set(cells)) == 3 * 5 * len(methods.METHODS)
    assert {m for _, _, m in cells} == set(methods.METHODS)
    assert set(WORKLOADS) == set(machine.WORKLOADS)
    assert [s.model for s in stages if s.steps] == list(FULL.models)
    assert cells[:3] == [(NAME, HEADLINE, m) for m in ("autoregressive", "aspire", "adaptive")]
    # Each of the table's methods has the paper's figures, from the checkout alone.
    for model, workload, method in cells:
        found = gpu_replay.of_paper(model, workload, method)
        assert (found is None) == (method in ("adaptive", "oracle"))
    aspire = gpu_replay.of_paper(NAME, HEADLINE, "aspire")
    assert aspire is not None
    assert (aspire["tokens_per_second"], aspire["tokens_per_verification"], aspire["batch"]) == (821.1, 6.44, 12)
    assert aspire["speedup"] == pytest.approx(2.30, abs=0.005)


def test_bytes_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-8B in bfloat16, by hand from its published sizes, and the paper's own times as a check of the whole."""
    q, kv, mlp = 2 * 4096 * 4096, 2 * 4096 * 1024, 3 * 4096 * 12_288
    layer = q + kv + mlp + 2 * 4096 + 2 * 128
    weights = 2 * (36 * layer + 4096 + 151_936 * 4096)  # the embedding is looked up in, the unembedding read
    token = 2 * 36 * 8 * 128 * 2
    load = Load(12, 32_768)
    assert gpu_plan.step_bytes(FULL, NAME, load, 0.0) == weights + 12 * 32_768 * token
    pages = 144  # 7 % of 2048, rounded up
    assert gpu_plan.step_bytes(FULL, NAME, load, 1.0) == weights + 12 * pages * 16 * token
    # No card is faster than its memory: the paper's steps take longer than a card of 3.9 TB/s needs at the least.
    for model in FULL.models:
        for workload, there in FULL.loads[model].items():
            milliseconds = machine.row(workload, model, "AutoRegressive").verify
            assert milliseconds is not None
            assert gpu_plan.step_bytes(FULL, model, there, 0.0) / 3.9e9 < milliseconds
            assert gpu_plan.held_bytes(FULL, model, there) < 94e9
    # 80 GB hold fewer rows.
    assert gpu_plan.fitting(FULL, NAME, load, None) == load
    assert gpu_plan.fitting(FULL, NAME, load, int(80e9)).batch == 12
    assert gpu_plan.fitting(FULL, NAME, load, int(60e9)).batch == 8
    assert gpu.main(["--plan", "3000"]) == 0
    assert float(capsys.readouterr().out.splitlines()[-1].split()[2]) < 8 * 60


def run(method: str, speed: float, paper: Any = None) -> dict[str, Any]:
    return {
        "model": NAME, "workload": HEADLINE, "method": method, "batch": 12, "context": 35_467,
        "tokens_per_second": speed, "tokens_per_verification": 6.0, "paper": paper,
    }  # fmt: skip


def test_the_table_compares_with_the_paper_and_the_targets() -> None:
    bandwidth = {"microseconds": 1.0}
    draft = {"kind": "draft", "context": 32_768, "launch": "on"}
    together = {"on": 20.0, "off": 18.5}
    results: dict[str, Any] = {
        "machine": {"device": "card", "jax": "0"}, "copy_gb_s": 4000.0, "skipped": ["late"], "errors": [],
        "bandwidth": [
            {**bandwidth, "case": "plain: 12 x 32768", "kind": "plain", "context": 32_768, "share_of_copy": 0.9},
            {**bandwidth, "case": "verify: 24 x 16384", "kind": "verify", "context": 16_384, "share_of_copy": 0.1},
            {**bandwidth, "case": "draft: 24 x 16384", "kind": "draft", "context": 16_384, "share_of_copy": 0.59},
        ],
        f"{NAME}: steps": {
            "batch": 12, "steps": [{**draft, "milliseconds": 7.5, "least": 5.0}],
            "fit": {"coefficients": [1e-3] * 4, "standard_errors": [1e-5] * 4, "mean_absolute_percentage_error": 2.0},
            "launch": {"library": "on", "faster": "off", "milliseconds_of_all_kinds": together},
        },
        "a": run("autoregressive", 400.0), "b": run("aspire", 1000.0, gpu_replay.of_paper(NAME, HEADLINE, "aspire")),
    }  # fmt: skip
    lines = gpu_table.table(results).splitlines()
    (line,) = [x for x in lines if x.startswith("  aspire ")]
    assert line.split() == [
        "aspire", "1000.0", "2.50x", "6.00", "|", "821.1", "2.30x", "6.44", "(12", "rows)",
    ]  # fmt: skip
    assert list(gpu_table.targets(results)) == [
        "target: plain: 12 x 32768, share of copy 0.90, bound 0.85: reached",
        "target: draft: 24 x 16384, share of copy 0.59, bound 0.60: MISSED",
        f"target: {NAME}, draft step, command buffers on, times its reads 1.50, bound 1.40: MISSED",
        f"{NAME}, command buffers: on 20.00 ms, off 18.50 ms; the library has them on: set programs.LAUNCH to 'off'",
    ]
    assert "  late: skipped" in lines
