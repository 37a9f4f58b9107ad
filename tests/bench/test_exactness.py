"""bench.exactness on a tiny model: equal answers, differences told, the tasks' scores of every method."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from aspire_jax import comparing
from aspire_jax.results import Completion, Stats
from bench import exactness
from bench.datasets import Item


@pytest.fixture
def bench(folder, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(exactness, "use_compile_cache", lambda: None)
    rows = [
        {"dataset": "qasper", "id": "q", "prompt": "Why is it so?", "answers": ["so"]},
        {"dataset": "lcc", "id": "c", "prompt": "x = 1\n" * 6, "answers": ["x = 1"]},
        {"dataset": "", "id": "n", "prompt": "Nothing to score here, and rather longer."},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*arguments):
        given = ["--model", str(folder), "--data", str(tmp_path / "data.jsonl"), "--max-tokens", "8", *arguments]
        code = exactness.command.run(
            exactness.parser(), exactness.measure, exactness.draw, given, lambda results: results["defects"] == 0
        )
        return code, capsys.readouterr()

    return run


SMALL = "--policy", "k_min=2", "--policy", "recent=1", "--policy", "gamma=2"


def test_every_answer_is_equal_and_scored(bench, tmp_path):
    pytest.importorskip("rapidfuzz")
    code, told = bench("--method", "aspire-fixed", *SMALL, "--json", str(tmp_path / "x.json"))
    assert code == 0, told
    results = json.loads((tmp_path / "x.json").read_text())
    row = results["methods"]["aspire-fixed"]
    assert row["equal"] == row["prompts"] == 3 and row["defects"] == 0 and row["drafted"] > 0
    assert set(results["scores"]) == {"qasper", "lcc"} and results["scores"]["lcc"]["metric"] == "edit"
    for task in results["scores"].values():
        assert task["answers"] == 1 and task["scores"]["aspire-fixed"] == task["scores"]["autoregressive"]
    assert "aspire-fixed: 3/3 equal, 0 near ties, 0 defects" in told.out
    pytest.importorskip("matplotlib")
    exactness.draw(results, str(tmp_path / "x.svg"))
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


def test_every_bit_in_other_slots(bench):
    code, told = bench("--method", "aspire-fixed", *SMALL, "--reproducible")
    assert code == 0 and "aspire-fixed: 3/3 equal, 0 near ties, 0 defects" in told.out


def test_a_defect_is_told_and_fails(bench, monkeypatch):
    real = comparing.comparison

    def other(*arguments):
        wrong = comparing.Difference(index=1, position=4, margin=0.7, near_tie=False)
        return dataclasses.replace(real(*arguments), differences=[wrong])

    monkeypatch.setattr(exactness, "comparison", other)
    code, told = bench("--method", "aspire-fixed", *SMALL)
    assert code == 1 and "aspire-fixed: c: differs from token 4 on, DEFECT, margin 0.7" in told.out


def test_refused(bench):
    code, told = bench("--shortest", "9000")
    assert code == 2 and "data: no prompt of 9000 to 120 tokens, expected at least one" in told.err
    code, told = bench("--policy", "gamma=2")  # aspire has no fixed length
    assert code == 2 and "--policy gamma: method aspire has no such option" in told.err


def test_scores_are_means_by_task():
    pytest.importorskip("rapidfuzz")
    items = {i: Item(dataset="hotpotqa", id=i, prompt="", answers=("red",)) for i in range(2)}
    stats = Stats(steps=1, drafted=0, accepted=0, verifications=1, emitted=1)

    def answer(i, text):
        fields = {"token_ids": [1], "finish_reason": "stop", "prompt_tokens": 1, "stats": stats}
        return Completion(id=i, index=i, text=text, margins=np.zeros(1, np.float32), **fields)

    found = exactness.task_scores(
        items, {"autoregressive": [answer(0, "red"), answer(1, "blue")], "aspire": [answer(0, "red"), answer(1, "red")]}
    )
    assert found == {"hotpotqa": {"metric": "f1", "answers": 2, "scores": {"autoregressive": 0.5, "aspire": 1.0}}}
