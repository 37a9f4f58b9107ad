"""Serving: equal answers whatever the method, the slots and the way of asking; ends where a request says."""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np
import pytest

import aspire_jax
from aspire_jax import Completion, InputError, Model, Request, host
from tests.api import models

METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "drafts": {"method": models.DRAFTS},
    "aspire": {"method": "aspire", "options": models.ASPIRE},
}
every_method = pytest.mark.parametrize("name", METHODS)


def generate(model: Model, requests: list, name: str = "drafts", **more) -> list[Completion]:
    return aspire_jax.generate(model, requests, **{"max_tokens": 40, "slots": 3, **METHODS[name], **more})


def forever(prompts: list[list[int]], **more) -> list[Request]:
    return [Request(token_ids=p, ignore_eos=True, **more) for p in prompts]


@every_method
def test_answers_are_those_of_plain_decoding_over_refilled_slots(model, prompts, plain, name):
    done = generate(model, forever(prompts), name)
    assert [c.index for c in done] == [c.id for c in done] == list(range(len(prompts)))
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert [c.text for c in done] == [c.text for c in plain]
    assert {len(c.token_ids) for c in done} == {40} and {c.finish_reason for c in done} == {"length"}
    assert [c.prompt_tokens for c in done] == [len(p) for p in prompts]
    if name == "drafts":
        assert min(c.stats.drafted for c in done) > 0 and sum(c.stats.accepted for c in done) > 0


def test_answers_do_not_depend_on_the_neighbours(model, prompts, plain):
    together = generate(model, forever(prompts), "autoregressive", slots=7)
    alone = [generate(model, forever([p]), "autoregressive")[0] for p in prompts[:3]]
    assert [c.token_ids for c in together] == [c.token_ids for c in plain]
    assert [c.token_ids for c in alone] == [c.token_ids for c in plain[:3]]


def test_reproducible_answers_are_equal_to_the_last_bit(model, prompts, plain):
    """In other slots, beside other prompts, with drafts or without.

    A sampled answer's logits are, too; its margins include the noise, which XLA computes up to rounding.
    """
    requests = forever(prompts[:3]) + forever(prompts[2:5], temperature=0.9, seed=5)
    alone = generate(model, requests, "autoregressive", slots=1, reproducible=True)
    drafted = generate(model, requests[::-1], slots=3, reproducible=True)[::-1]
    assert [c.token_ids for c in alone[:3]] == [c.token_ids for c in plain[:3]] and alone[2].token_ids != alone[
        3
    ].token_ids
    assert sum(c.stats.accepted for c in drafted[:3]) > 0
    for a, b in zip(alone, drafted, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.margins, b.margins, atol=1e-5)
    for a, b in zip(alone[:3], drafted[:3], strict=True):
        assert a.margins.tobytes() == b.margins.tobytes()


def test_margins_and_statistics_fit_the_tokens(model, prompts, plain):
    for a, b in zip(plain, generate(model, forever(prompts)), strict=True):
        assert a.margins.shape == b.margins.shape == (40,) and (b.margins > 0).all()
        np.testing.assert_allclose(a.margins, b.margins, atol=1e-4)
        assert a.stats.steps == a.stats.verifications == 40 and a.stats.mean_accepted_length == 1
        s = b.stats
        assert s.emitted == 40 == s.accepted + s.verifications and s.accepted <= s.drafted
        assert s.mean_accepted_length == 40 / s.verifications
        held, emitted = b.rounds.T
        assert len(held) == s.verifications and held.sum() == s.drafted and emitted.sum() == 40
        assert (emitted - 1).sum() == s.accepted and (emitted <= held + 1).all() and held.max() > 0
        assert a.rounds.tolist() == [[0, 1]] * 40


def test_stream_gives_the_same_in_pieces(model, prompts, plain):
    stream = aspire_jax.stream(model, forever(prompts), max_tokens=40, slots=3, **METHODS["drafts"])
    texts, tokens, ends = [""] * 7, [[] for _ in range(7)], []
    for chunk in stream:
        texts[chunk.index] += chunk.text
        tokens[chunk.index] += chunk.token_ids
        if chunk.completion is not None:
            ends.append(chunk.index)
            assert chunk.completion.text == texts[chunk.index]
    assert texts == [c.text for c in plain] and tokens == [c.token_ids for c in plain]
    assert sorted(ends) == list(range(7)) and ends != list(range(7))  # in the order in which they finish
    r = stream.report
    assert (r.requests, r.finished, r.completion_tokens, r.planned_tokens) == (7, 7, 280, 280)
    assert r.prefilled == r.prompt_tokens == sum(len(p) - 1 for p in prompts)
    assert r.emitted == 280 == r.accepted + r.verifications
    assert r.decode_seconds > 0 and r.tokens_per_second == 280 / r.decode_seconds
    assert len(r.cost) == 4 and min(r.cost) > 0


@pytest.mark.parametrize("name", ["autoregressive", "drafts"])
def test_what_prompts_have_in_common_is_prefilled_once(model, monkeypatch, name):
    """Slots are taken over while others decode; the answers are those of each prompt alone."""
    monkeypatch.setattr(host, "CHUNK", 16)
    document, *questions = models.token_prompts(40, 9, 21, 5, 30)
    prompts = [document + question for question in questions]
    prompts += [prompts[1], prompts[1][:35], questions[3]]
    alone = [generate(model, forever([p]), "autoregressive", max_tokens=9)[0] for p in prompts]
    stream = aspire_jax.stream(model, forever(prompts), max_tokens=9, slots=3, **METHODS[name])
    for a, b in zip(alone, stream.collect(), strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.margins, b.margins, atol=1e-5)
    assert stream.report.prefilled + stream.report.reused == stream.report.prompt_tokens
    if name == "autoregressive":  # all slots become free at once, so it is known who takes which
        # Two chunks of the document for each further question; all of the prompt that was there as a whole.
        assert stream.report.reused == 3 * 32 + len(prompts[4]) - 1 + 32


@pytest.mark.parametrize("name", ["drafts", "magicdec-snapkv"])
def test_a_shared_beginning_leaves_every_bit_of_a_reproducible_answer(model, monkeypatch, name):
    """From slots whose requests a stop string ended, too."""
    monkeypatch.setattr(host, "CHUNK", 16)
    document, *questions = models.token_prompts(40, 9, 21, 5, 30, 2)
    options = {"budget": 16, "window": 8, "kernel": 1} if name == "magicdec-snapkv" else {}
    how = METHODS.get(name, {"method": name, "options": options})
    more = {"max_tokens": 12, "reproducible": True, **how}
    requests = [Request(token_ids=document + q, ignore_eos=True) for q in questions]
    alone = [aspire_jax.generate(model, [r], **more)[0] for r in requests]
    ends = [dataclasses.replace(r, stop=(c.text[2:5],)) for r, c in zip(requests[:2], alone, strict=False)]
    stream = aspire_jax.stream(model, [*ends, *requests[2:]], slots=2, **more)
    done = stream.collect()
    assert stream.report.reused >= 4 * 32 and [c.finish_reason for c in done[:2]] == ["stop", "stop"]
    for a, b in zip(alone, done, strict=True):
        kept = len(b.token_ids)
        assert a.token_ids[:kept] == b.token_ids and a.margins[:kept].tobytes() == b.margins.tobytes()


def test_a_request_takes_the_free_slot_that_holds_its_beginning(model, monkeypatch):
    monkeypatch.setattr(host, "CHUNK", 16)
    one, two = models.token_prompts(50, 60)
    stream = aspire_jax.stream(model, forever([one, two, two, one]), method="autoregressive", max_tokens=3, slots=2)
    done = stream.collect()
    assert [c.token_ids for c in done[:2]] == [c.token_ids for c in done[:1:-1]]
    assert (stream.report.prefilled, stream.report.reused) == (49 + 59, 49 + 59)


def test_completions_of_one_prompt_prefill_it_once(model, prompts):
    request = Request(token_ids=prompts[3], n=5, temperature=1.0, seed=1, ignore_eos=True)
    stream = aspire_jax.stream(model, [request], max_tokens=9, slots=2)
    assert len({tuple(c.token_ids) for c in stream.collect()}) == 5
    assert (stream.report.prefilled, stream.report.reused) == (59, 4 * 59)


def test_a_stream_may_be_left(model, prompts, plain):
    stream = aspire_jax.stream(model, forever(prompts), max_tokens=40, slots=3, method="autoregressive")
    next(stream)
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    assert generate(model, forever(prompts[:3]), "autoregressive")[2].token_ids == plain[2].token_ids


@every_method
def test_one_token(model, prompts, plain, name):
    done = generate(model, forever(prompts), name, max_tokens=1)
    assert [c.token_ids for c in done] == [c.token_ids[:1] for c in plain]
    assert all(c.finish_reason == "length" for c in done)


def test_every_request_has_its_own_limit(model, prompts, plain):
    limits = [1, 2, 3, 5, 40, 17, 33]
    requests = [Request(token_ids=p, ignore_eos=True, max_tokens=n) for p, n in zip(prompts, limits, strict=True)]
    done = generate(model, requests)
    assert [c.token_ids for c in done] == [c.token_ids[:n] for c, n in zip(plain, limits, strict=True)]


@every_method
def test_a_stop_token_ends_the_answer_wherever_it_comes(model, prompts, plain, name):
    """Every place of an answer in turn, so that some stop tokens lie within an accepted run of drafts."""
    answer = plain[3].token_ids
    places = [k for k in range(40) if answer.index(answer[k]) == k]
    requests = forever([prompts[3]] * len(places))
    requests = [
        Request(token_ids=prompts[3], ignore_eos=True, stop_token_ids=[answer[k]], id=f"at {k}") for k in places
    ]
    for k, done in zip(places, generate(model, requests, name), strict=True):
        assert done.token_ids == answer[: k + 1] and done.finish_reason == "stop"
        assert done.margins.shape == (k + 1,)
        assert done.text == generate_text(model, prompts[3], answer[:k])
        assert done.stats.accepted <= k  # nothing behind the stop counts
        assert done.stats.emitted == k + 1


def generate_text(model: Model, prompt: list[int], tokens: list[int]) -> str:
    decoder = model.tokenizer.stream(prompt)
    return decoder.push(*tokens) + decoder.finish() if tokens else ""


def test_the_models_end_token_ends_unless_ignored(model, prompts, plain):
    answer = plain[3].token_ids
    config = aspire_jax.ModelConfig(**{**vars(model.config), "eos_ids": (answer[4],)})
    other = Model(config, model.params, model.tokenizer)
    end = answer.index(answer[4]) + 1
    done = aspire_jax.generate(
        other, [prompts[3], *forever([prompts[3]]), prompts[0]], max_tokens=40, slots=3, method="autoregressive"
    )
    assert done[0].token_ids == answer[:end] and done[0].finish_reason == "stop"
    assert done[1].token_ids == answer and done[1].finish_reason == "length"


@every_method
def test_stop_strings_end_at_the_same_token_for_every_method(model, prompts, plain, name):
    text = plain[4].text
    stops = [text[k : k + n] for k in range(0, len(text) - 4, 3) for n in (1, 2, 4)]
    requests = [Request(token_ids=prompts[4], ignore_eos=True, stop=stop, id=i) for i, stop in enumerate(stops)]
    for stop, done in zip(stops, generate(model, requests, name), strict=True):
        assert done.text == text[: text.index(stop)], repr(stop)
        assert done.finish_reason == "stop"
        n = len(done.token_ids)
        assert done.token_ids == plain[4].token_ids[:n]
        assert stop in generate_text(model, prompts[4], done.token_ids)
        assert stop not in generate_text(model, prompts[4], done.token_ids[:-1]).rstrip("\ufffd")
        assert done.margins.shape == (n,)


def test_the_models_length_ends_an_answer(model):
    lengths = (127, 126, 100)
    requests = forever(models.token_prompts(*lengths))
    results = [generate(model, requests, name, max_tokens=1000) for name in METHODS]
    for done in zip(*results, strict=True):
        assert len({tuple(c.token_ids) for c in done}) == 1
    assert [len(c.token_ids) for c in results[0]] == [1, 2, 28]
    assert {c.finish_reason for c in results[0]} == {"length"}


def test_a_shorter_length_may_be_asked_for(model, prompts):
    done = generate(model, forever(prompts[3:6]), max_length=100)
    assert [len(c.token_ids) for c in done] == [40, 13, 40]


def test_prompts_in_every_form(model):
    text = "hello there"
    ids = model.tokenizer.encode(text)
    messages = [{"role": "user", "content": "hello"}]
    chat = model.tokenizer.encode_chat(messages)
    done = generate(model, [text, ids, np.asarray(ids), Request(prompt=text), messages, chat], max_tokens=8)
    assert len({tuple(c.token_ids) for c in done[:4]}) == 1
    assert done[4].token_ids == done[5].token_ids and done[4].prompt_tokens == len(chat)


def test_a_model_without_tokenizer_takes_and_gives_tokens(model, prompts, plain):
    bare = Model(model.config, model.params, None)
    done = aspire_jax.generate(bare, forever(prompts[:3]), max_tokens=40, slots=3, method="autoregressive")
    assert [c.token_ids for c in done] == [c.token_ids for c in plain[:3]] and done[0].text == ""
    with pytest.raises(InputError, match="prompt 0: prompt: model model has no tokenizer"):
        aspire_jax.generate(bare, ["text"])


def test_another_call_of_the_same_sizes_compiles_nothing(model, prompts, caplog):
    generate(model, forever(prompts[:4]), "aspire")
    others = [[5, 6, 7] * n for n in (1, 20, 9, 14, 2)]
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        generate(
            model, [Request(token_ids=p, stop_token_ids=[9, 8], stop="x") for p in others], "aspire", max_tokens=51
        )
    assert [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()] == []


def test_the_fit_of_one_call_serves_the_next(model, prompts):
    first = aspire_jax.stream(model, forever(prompts[2:5]), slots=3, max_tokens=40, **METHODS["aspire"])
    first.collect()
    before = first.fit.coefficients
    second = aspire_jax.stream(model, forever(prompts[2:5]), slots=3, max_tokens=40, fit=first.fit, **METHODS["aspire"])
    second.collect()
    assert second.fit is first.fit and not np.array_equal(before, second.fit.coefficients)


def test_progress_is_told_of_every_stage(model, prompts):
    seen = []
    stages = lambda report: seen.append((report.stage, report.prefilled, report.completion_tokens))  # noqa: E731
    generate(model, forever(prompts[:4]), "autoregressive", progress=stages)
    assert [s for s, *_ in seen].count("compile") == 1 and seen[0][0] == "compile"
    assert [n for s, n, _ in seen if s == "prefill"] == [1, 17, 76]  # a prompt of one token needs none
    assert seen[-1] == ("decode", 76, 160)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "none"}, "method: 'none', expected one of autoregressive, "),
        ({"options": {"speed": 1}}, "option 'speed'"),
        ({"options": {"rho": 2.0}}, "rho: 2.0"),
        ({"options": {"layers": (5,)}}, "layers: 5, expected 0 to 1"),
        ({"slots": 0}, "slots: 0"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"max_length": 1000}, "max_length: 1000, expected 2 to 128"),
    ],
)
def test_arguments_out_of_range_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        aspire_jax.stream(model, ["text"], **arguments)
