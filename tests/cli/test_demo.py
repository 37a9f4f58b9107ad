"""`aspire demo` on a tiny model: its last line, its figures, its exit code where an answer differs."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

import aspire_jax
from aspire_jax import comparing
from aspire_jax.cli import demo_prompts, setup
from tests.cli.files import SMALL

NO_GPU = "--implementation: 'pallas' cannot serve this engine: the platform is cpu, expected a CUDA GPU"
LAST = r"exact (\d)/(\d), decode speedup \d+\.\d\dx, mean accepted \d+\.\d"


@pytest.fixture
def longer(model, monkeypatch):
    """The tiny model with room for a prompt of the demo's kind."""
    config = dataclasses.replace(model.config, max_length=512)
    other = aspire_jax.Model(config, model.params, model.tokenizer, "tiny")
    monkeypatch.setattr(setup, "load_model", lambda *_args, **_more: other)
    return other


COMMAND = ("demo", "--context", 300, "--prompts", 3, "--max-tokens", 24, *SMALL[4:])


def test_both_methods_agree(aspire, longer, tmp_path):
    done = aspire(*COMMAND, "--json", tmp_path / "demo.json")
    assert done.code == 0, done.err
    assert re.fullmatch(LAST, done.out.splitlines()[-1]).groups() == ("3", "3")
    assert "summarise: data model" in done.out and "prefill, once for both" in done.out
    assert "autoregressive: decode" in done.err and "aspire: decode" in done.err
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["exact"] == found["prompts"] == 3 and len(found["rounds"]["aspire"]) == 2
    assert len(found["answers"]) == 3 and found["differences"] == []


def test_a_difference_that_is_no_tie_fails(aspire, longer, monkeypatch):
    compare = comparing.compare

    def other(*arguments, **more):
        found = compare(*arguments, **more)
        wrong = comparing.Difference(index=1, position=4, margin=0.7, near_tie=False)
        tie = comparing.Difference(index=2, position=3, margin=1e-5, near_tie=True)
        return dataclasses.replace(found, differences=[wrong, tie] if failing else [tie])

    monkeypatch.setattr(comparing, "compare", other)
    failing = True
    done = aspire(*COMMAND)
    assert done.code == 1 and "question: exceptions: differs from token 4 on, NOT a near tie (margin 0.7)" in done.out
    assert done.out.splitlines()[-1].startswith("exact 1/3, ")
    failing = False
    done = aspire(*COMMAND, "--quiet")
    assert done.code == 0 and re.fullmatch(LAST, done.out.strip()).groups() == ("2", "3")
    assert done.err == ""


def test_json_alone(aspire, longer):
    done = aspire(*COMMAND, "--rounds", 1, "--json", "-")
    assert done.code == 0 and json.loads(done.out)["exact"] == 3 and done.err == ""


def test_refused(aspire, longer, folder):
    assert "--context: 500, expected 256 to 488" in aspire("demo", "--context", 500, "--max-tokens", 24).err
    assert "--policy k_min: 'x', expected a whole number" in aspire("demo", "--policy", "k_min=x").err
    done = aspire(*COMMAND, "--policy", "layers=7")
    assert done.code == 2 and "--policy layers: 7, expected 0 to 1" in done.err
    done = aspire(*COMMAND, "--implementation", "pallas")
    assert done.code == 2 and done.err.splitlines()[-1].endswith(NO_GPU)


def test_prompts_are_long_and_different(model):
    requests = demo_prompts.requests(model.tokenizer, 5000, 19)
    assert len({r.id for r in requests}) == len(requests) == 19
    texts = [r.prompt or r.messages[0]["content"] for r in requests]
    assert len(set(texts)) == 19
    lengths = [len(model.tokenizer.encode(text)) for text in texts]
    assert min(lengths) > 4500 and max(lengths) <= 5000
    assert sum(r.prompt is not None for r in requests) == 6
