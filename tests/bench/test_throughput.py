"""bench.throughput on a tiny model: every figure is there, fits the others, and the answers are alike."""

from __future__ import annotations

import json

import pytest

from aspire_jax.comparing import Arrival
from bench import machine, throughput, throughput_cell, throughput_report

SMALL = "d_max=3", "gamma_init=2", "k_min=2", "recent=1"


@pytest.fixture
def bench(folder, data, monkeypatch, capsys):
    monkeypatch.setattr(machine, "rates", lambda repeats=5: {"read_gb_s": 10.0, "matmul_gflop_s": 100.0})
    monkeypatch.setattr(throughput, "use_compile_cache", lambda: None)

    def run(*arguments):
        common = ["--model", str(folder), "--data", *data, "--batches", "2", "--max-tokens", "16"]
        code = throughput.command.run(
            throughput.parser(), throughput.measure, throughput_report.draw, [*common, *map(str, arguments)]
        )
        return code, capsys.readouterr()

    return run


def test_all_figures_of_replayed_and_continuous_batches(bench, tmp_path):
    methods = "autoregressive", "aspire-fixed"
    options = [x for text in ("gamma=2", "k_min=2", "recent=1") for x in ("--policy", f"aspire-fixed:{text}")]
    files = "--json", tmp_path / "x.json", "--table", tmp_path / "x.md"
    code, told = bench("--methods", *methods, "--contexts", 50, "--seeds", 2, "--continuous", 1, *options, *files)
    assert code == 0, told.err
    results = json.loads((tmp_path / "x.json").read_text())
    assert results["left_out"] == {} and results["options"]["aspire-fixed"] == {"gamma": 2, "k_min": 2, "recent": 1}
    replayed, continuous = results["cells"]
    assert [c["mode"] for c in results["cells"]] == ["replayed", "continuous"]
    assert 48 <= replayed["prompt_tokens"][0] <= replayed["prompt_tokens"][1] <= 50
    for cell, answers in ((replayed, 4), (continuous, 6)):
        plain, fixed = (cell["methods"][m] for m in methods)
        assert plain["speedup"]["values"] == [1.0] * len(plain["speedup"]["values"])
        assert plain["tokens_per_verification"]["mean"] == 1 and plain["acceptance"] is None
        assert plain["drafted_per_token"] == 0 and fixed["drafted_per_token"] > 0
        assert fixed["exact"] == fixed["answers"] == plain["answers"] == answers and fixed["defects"] == 0
        assert 1 <= fixed["tokens_per_verification"]["mean"] <= 3 and 0 <= fixed["acceptance"]["mean"] <= 1
        latency = fixed["time_per_output_token_ms"]
        assert 0 < latency["median"] <= latency["p95"] <= latency["p99"]
        # A plain step reads the weights for two rows at most, and their keys and values.
        assert plain["bytes_per_token"] > throughput.machine.bytes_read(_model(results), (1, 0, 0, 0)) / 2
    assert len(replayed["methods"]["aspire-fixed"]["speedup"]["values"]) == 2
    assert "2 x" in told.out and "continuous" in told.out
    assert all(f"50 x 2, replayed: {n} of 2 seeds" in told.out for n in (1, 2))
    table = (tmp_path / "x.md").read_text()
    assert table.count("`aspire-fixed`") == 2 and results["command"] in table and "| 50, continuous | 2 |" in table
    pytest.importorskip("matplotlib")
    throughput_report.draw(results, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 10_000


def _model(results):
    import aspire_jax

    return aspire_jax.load(results["command"].split("--model ")[1].split()[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "aspire"), "--methods: aspire, expected autoregressive among them"),
        (("--methods", "autoregressive", "fast"), "--method: 'fast', expected one of autoregressive"),
        (("--policy", "gamma=3"), "--policy: 'gamma=3', expected METHOD:NAME=VALUE"),
        (("--policy", "aspire:size=3"), "--policy size: method aspire has no such option"),
        (("--methods", "autoregressive", "aspire", "--policy", "aspire:d_max=99"), "method aspire: d_max: 99, "),
        (("--contexts", "500", "--methods", "autoregressive"), "context: 500 tokens, expected at most 112"),
    ],
)
def test_refused(bench, arguments, message):
    code, told = bench("--contexts", 50, "--seeds", 1, *arguments)
    assert code == 2 and message in told.err and told.err.count("\n") == 1


def test_time_per_output_token():
    def arrival(index, tokens, decoding, waiting):
        return Arrival(index=index, tokens=tokens, decoding=decoding, waiting=waiting)

    # A request's first run counts by itself; later ones with the waiting since the run before.
    found = throughput_cell.time_per_output_token(
        [arrival(0, 2, 0.02, 5.0), arrival(1, 1, 0.02, 5.0), arrival(0, 4, 0.02, 0.04)]
    )
    assert found == {"median": pytest.approx(10.0), "p95": pytest.approx(20.0), "p99": pytest.approx(20.0)}
