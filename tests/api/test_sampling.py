"""Sampling through `generate`: seeds, several answers, log-probabilities, ends; whatever the method and the slots."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest

import aspire_jax
from aspire_jax import Completion, Model, Request
from aspire_jax.comparing import compare
from aspire_jax.request import prepare
from aspire_jax.sampling.params import SamplingParams, support_for
from aspire_jax.sampling.rows import Support
from tests.api import models

PLAIN, DRAFTS = {"method": "autoregressive"}, {"method": models.DRAFTS}
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0},
    {"temperature": 1.2, "top_k": 40, "frequency_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.02, "logit_bias": {"7": 3}},
    {"temperature": 0, "repetition_penalty": 1.4, "logprobs": True},
    {"temperature": 0.9, "min_tokens": 5},
]


# Two requests more wherever there are few, with all there is to support and the longest prompt: one engine for all.
FULL = {"logprobs": 3, "presence_penalty": 0.1, "logit_bias": {7: 1}, "seed": 3, "ignore_eos": True}


def fillers() -> list[Request]:
    long = models.token_prompts(87)[0]
    return [Request(token_ids=long, id=f"filler {i}", temperature=1.0, max_tokens=24, **FULL) for i in (0, 1)]


def generate(model: Model, requests: list, **more) -> list[Completion]:
    done = aspire_jax.generate(model, [*requests, *fillers()], **{"max_tokens": 24, "slots": 3, **more})
    return [c for c in done if not str(c.id).startswith("filler")]


@pytest.fixture(scope="module")
def requests(prompts) -> list[Request]:
    pairs = zip(prompts, KINDS, strict=True)
    return [Request(token_ids=p, ignore_eos=True, seed=70 + i, **kind) for i, (p, kind) in enumerate(pairs)]


@pytest.fixture(scope="module")
def sampled(model, requests) -> list[Completion]:
    return generate(model, requests, **PLAIN)


def test_the_seed_alone_decides(model, requests, sampled, plain):
    """With drafts; in another order, so that slots and neighbours differ; greedy rows are those of a greedy engine."""
    drafted = generate(model, requests[::-1], **DRAFTS)[::-1]
    assert [c.token_ids for c in drafted] == [c.token_ids for c in sampled]
    assert sum(c.stats.accepted for c in drafted) > 5 < sum(c.stats.drafted - c.stats.accepted for c in drafted)
    assert sampled[2].token_ids == plain[2].token_ids[:24]
    assert [c.seed for c in sampled] == [70, 71, None, 73, 74, None, 76]
    for a, b in zip(sampled, drafted, strict=True):
        np.testing.assert_allclose(a.margins, b.margins, atol=1e-3)
        assert (a.margins > 0).all()


def test_log_probabilities(sampled):
    assert [i for i, c in enumerate(sampled) if c.logprobs is not None] == [1, 5]
    for c, best in ((sampled[1], 3), (sampled[5], 0)):
        assert [t.token_id for t in c.logprobs] == c.token_ids
        for t in c.logprobs:
            values = [value for _, value in t.best]
            assert len(values) == best and values == sorted(values, reverse=True) and t.logprob <= 0
            assert all(value == t.logprob for token, value in t.best if token == t.token_id)
    assert sampled[1].as_dict()["logprobs"][0]["best"][0].keys() == {"token_id", "logprob"}


def test_several_answers_and_what_was_drawn_can_be_drawn_again(model, prompts):
    three = Request(token_ids=prompts[2], n=3, id="a", ignore_eos=True)
    asked = [three, prompts[6], *fillers()]
    stream = aspire_jax.stream(model, asked, temperature=1.0, max_tokens=24, slots=3, **PLAIN)
    pieces: dict[tuple, list[int]] = {}
    for chunk in stream:
        pieces.setdefault((chunk.id, chunk.choice), []).extend(chunk.token_ids)
    assert {("a", 0), ("a", 1), ("a", 2), (1, 0)} < set(pieces) and stream.report.finished == 6
    done = generate(model, [three, prompts[6]], temperature=1.0, **PLAIN)
    assert [(c.id, c.index, c.choice) for c in done] == [("a", 0, 0), ("a", 0, 1), ("a", 0, 2), (1, 1, 0)]
    first = done[0].seed
    assert [c.seed for c in done] == [first, first + 1, first + 2, first + 3]
    assert len({tuple(c.token_ids) for c in done[:3]}) == 3
    again = [
        generate(model, [Request(token_ids=prompts[2], ignore_eos=True, seed=c.seed)], temperature=1.0, **PLAIN)[0]
        for c in done[:3]
    ]
    assert [c.token_ids for c in again] == [c.token_ids for c in done[:3]]


def test_nothing_ends_an_answer_before_min_tokens(model, prompts, plain):
    """A stop token is not drawn, a stop string does not count."""
    answer = plain[3].token_ids
    stop = answer[4]
    first = answer.index(stop)
    (done,) = generate(model, [Request(token_ids=prompts[3], ignore_eos=True, stop_token_ids=[stop])], **PLAIN)
    assert done.token_ids == answer[: first + 1]
    (done,) = generate(
        model, [Request(token_ids=prompts[3], ignore_eos=True, stop_token_ids=[stop], min_tokens=first + 1)], **PLAIN
    )
    assert done.token_ids[:first] == answer[:first] and stop not in done.token_ids[: first + 1]
    text = plain[4].text
    piece = next(text[i : i + 2] for i in range(len(text)) if text.count(text[i : i + 2]) > 1)
    many = [Request(token_ids=prompts[4], ignore_eos=True, stop=piece, min_tokens=n, id=n) for n in (0, 1, 3, 8, 15)]
    for done in generate(model, many, max_tokens=40, **PLAIN):
        assert len(done.token_ids) > done.id or done.finish_reason == "length"
        n = len(done.token_ids)
        assert done.token_ids == plain[4].token_ids[:n]
        if done.finish_reason == "stop":
            assert text.startswith(done.text + piece)


def test_other_parameters_compile_nothing(model, requests, sampled, caplog):
    """One program for all of them, and for greedy requests beside them."""
    others = [Request(token_ids=r.token_ids, ignore_eos=True, **KINDS[i - 2]) for i, r in enumerate(requests)]
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        generate(model, others, seed=5, **PLAIN)
    assert [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()] == []


def test_compare_takes_sampled_requests(model, requests):
    three = prepare(model, [requests[3], *fillers()], max_tokens=24)
    found = compare(model, three, candidate=models.DRAFTS, rounds=1)
    assert found.exact == 3 and found.defects == []


def test_an_engine_supports_what_is_asked_for_and_no_more():
    p = SamplingParams
    assert support_for([p(), p(top_k=5)]) is None
    assert support_for([p(), p(temperature=1)], "rejection") == Support(acceptance="rejection")
    assert support_for([p(min_tokens=3)], "rejection") == Support()  # nothing is sampled
    assert support_for([p(logprobs=0)]) == Support(logprobs=0)
    assert support_for([p(logprobs=2), p(presence_penalty=1)]) == Support(logprobs=5, penalties=True)
    assert support_for([p(logprobs=6), p(logit_bias=((3, 1.0),))]) == Support(logprobs=20, bias=True)


def test_acceptance_is_one_of_two(model):
    with pytest.raises(ValueError, match="acceptance: 'lucky', expected one of coupled, rejection"):
        aspire_jax.stream(model, ["text"], temperature=1, acceptance="lucky")
