"""Requests that cannot be served are refused by name before any work; truncation keeps both ends."""

from __future__ import annotations

import pytest

import aspire_jax
from aspire_jax import InputError, Request
from aspire_jax.request import SAMPLING, drop_middle, from_mapping, prepare


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", 'prompt 1: prompt: "", expected text, not empty'),
        ("\ud800", "prompt 1: prompt: .*expected text"),
        ([], r"prompt 1: token_ids: \[\], expected token ids from 0 to 259, at least one"),
        ([3, 260], r"prompt 1: token_ids: \[3, 260\], expected"),
        ([3, -1], "token_ids"),
        ([3, True], "token_ids"),
        (5, "prompt 1: prompt: 5, expected a string, token ids, messages or a Request"),
        (b"text", "prompt 1: prompt: .*expected a string"),
        ([{"role": "user"}], "prompt 1: messages: "),
        ([{"role": "user", "content": ["a"]}], "prompt 1: messages: "),
        (Request(), "prompt 1: no prompt, expected one of prompt, messages, token_ids"),
        (Request(prompt="a", token_ids=[3]), "prompt 1: prompt and token_ids, expected one of"),
        (Request(prompt="a", id=1.5), "id: 1.5, expected a string or a whole number"),
        (Request(prompt="a", id=True), "id: true"),
        (Request(prompt="a", id=0), r"request 0: id: 0, expected an id of its own \(prompt 0 has it too\)"),
        (
            Request(prompt="a", id="x", max_tokens=0),
            "request 'x': max_tokens: 0, expected a whole number of at least 1",
        ),
        (Request(prompt="a", max_tokens=2.0), "max_tokens: 2.0"),
        (Request(prompt="a", stop=""), 'stop: "", expected a string or a list of strings'),
        (Request(prompt="a", stop=["x", 3]), "stop"),
        (Request(prompt="a", stop_token_ids=[260]), r"stop_token_ids: \[260\], expected a list of token ids"),
        (Request(prompt="a", stop_token_ids=7), "stop_token_ids: 7"),
        (Request(prompt="a", ignore_eos="no"), 'ignore_eos: "no", expected true or false'),
        (Request(prompt="a", truncate=1), "truncate: 1, expected true or false"),
        (Request(prompt="a", sampling={"temperature": 0.7}), "temperature: 0.7, expected 0: decoding is greedy"),
        (Request(prompt="a", sampling={"top_p": "high"}), 'top_p: "high", expected a number'),
        (Request(prompt="a", sampling={"logit_bias": {"5": 1}}), "logit_bias"),
        (Request(prompt="a", sampling={"logprobs": True}), "logprobs: true"),
        (Request(prompt="a", sampling={"beam": 4}), "beam: 4, expected one of the sampling fields"),
        (Request(prompt="x" * 200, id="long"), "request 'long': prompt: 200 tokens, expected fewer than 128"),
    ],
)
def test_refused_by_name(model, prompt, message):
    with pytest.raises(InputError, match=message) as caught:
        aspire_jax.stream(model, ["fine", prompt])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompts", ["text", Request(prompt="text"), [], {"role": "user"}])
def test_prompts_are_a_list(model, prompts):
    with pytest.raises(InputError, match=r"prompts: .*expected"):
        aspire_jax.stream(model, prompts)


def test_what_greedy_decoding_serves_is_accepted(model):
    neutral = {"temperature": 0.0, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "n": 1}
    neutral |= {"min_tokens": 0, "best_of": 1}
    assert set(neutral) == set(SAMPLING)
    prepare(model, [from_mapping({"prompt": "a", **neutral}, "here")])


def test_null_means_not_given(model):
    r = from_mapping({"id": "a", "prompt": "a", "stop": None, "max_tokens": None, "temperature": None}, "here")
    assert prepare(model, [r], max_tokens=5)[0].max_new == 5


def test_unknown_fields_are_refused():
    with pytest.raises(InputError, match='here: promt: "a", expected one of the fields prompt, messages'):
        from_mapping({"promt": "a"}, "here")


def test_the_call_fills_in_what_a_request_leaves_open(model):
    requests = [Request(prompt="a"), Request(prompt="a", stop=[], max_tokens=3, stop_token_ids=[9, 2], ignore_eos=True)]
    one, two = prepare(model, requests, max_tokens=7, stop="end")
    assert (one.max_new, one.stop, one.stop_ids) == (7, ("end",), (2,))
    assert (two.max_new, two.stop, two.stop_ids) == (3, (), (9, 2))


@pytest.mark.parametrize(
    ("length", "max_tokens", "kept"), [(127, 1, 127), (128, 1, 127), (500, 28, 100), (500, 999, 64)]
)
def test_truncation_leaves_room_for_the_answer(model, length, max_tokens, kept):
    tokens = [3 + i % 250 for i in range(length)]
    (r,) = prepare(model, [tokens], max_tokens=max_tokens, truncate=True)
    assert len(r.tokens) == kept and r.max_new == min(max_tokens, 128 - kept)
    if kept < length:
        head = kept - kept // 2
        assert r.tokens.tolist() == tokens[:head] + tokens[length - kept // 2 :]


@pytest.mark.parametrize(
    ("keep", "expected"), [(9, [0, 1, 2, 3, 4]), (5, [0, 1, 2, 3, 4]), (4, [0, 1, 3, 4]), (3, [0, 1, 4]), (1, [0])]
)
def test_drop_middle(keep, expected):
    assert drop_middle(range(5), keep) == expected
