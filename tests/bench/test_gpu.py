"""bench.gpu runs from end to end: tiny sizes, kernels interpreted. What it measures there means nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import gpu


def test_the_script_runs_and_keeps_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--json", str(file), "--minutes", "30"]) == 0
    results = json.loads(file.read_text())
    assert results["errors"] == results["skipped"] == []
    assert all(case["ok"] for case in results["correctness"])
    assert {case["case"].split(":")[0] for case in results["bandwidth"]} == {"plain", "verify", "draft"}
    kinds = {step["kind"].split(" at ")[0] for step in results["Qwen3-8B: steps"]["steps"]}
    assert kinds == {"plain", "draft", "verify 3", "mixed: half verify 2"}
    whole = results["Qwen3-8B: aspire"]
    assert whole["tokens_per_verification"] > 1
    assert 0 < whole["acceptance"] <= 1
    assert "Qwen3-8B: aspire" in capsys.readouterr().out


def test_a_run_without_time_says_what_it_skipped(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--json", str(file), "--minutes", "0"]) == 0
    results = json.loads(file.read_text())
    assert "correctness" in results["skipped"]
    assert "Qwen3-8B: weights" in results["skipped"]


def test_a_machine_without_a_gpu_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu.main([])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "bench.gpu: error: device: cpu, expected a GPU (or --tiny)\n"
