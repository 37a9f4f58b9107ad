"""Requests that cannot be served are refused by name before any work; truncation keeps both ends."""

from __future__ import annotations

import pytest

import aspire_jax
from aspire_jax import InputError, Request
from aspire_jax.request import FIELDS, drop_middle, from_mapping, prepare
from aspire_jax.sampling.params import SAMPLING, SamplingParams


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
        (Request(prompt="a", temperature=-1), "prompt 1: temperature: -1, expected a number, 0"),
        (Request(prompt="a", temperature=1e-3), "temperature: 0.001, expected a number, 0 .greedy. or 0.01 to 100"),
        (Request(prompt="a", temperature=float("nan")), "temperature: NaN"),
        (Request(prompt="a", temperature=True), "temperature: true"),
        (Request(prompt="a", top_k=-1), "top_k: -1, expected a whole number from 0 .all tokens. to"),
        (Request(prompt="a", top_k=2.0), "top_k: 2.0"),
        (Request(prompt="a", top_p="high"), 'top_p: "high", expected a number above 0'),
        (Request(prompt="a", top_p=0), "top_p: 0, expected a number above 0"),
        (Request(prompt="a", top_p=1.1), "top_p: 1.1"),
        (Request(prompt="a", min_p=-0.1), "min_p: -0.1, expected a number from 0"),
        (Request(prompt="a", repetition_penalty=0), "repetition_penalty: 0, expected a number from 0.01"),
        (Request(prompt="a", presence_penalty=3), "presence_penalty: 3, expected a number from -2 to 2"),
        (Request(prompt="a", frequency_penalty="x"), "frequency_penalty"),
        (
            Request(prompt="a", logit_bias={"260": 1}),
            r'logit_bias: {"260": 1}, expected an object of token ids \(0 to 259',
        ),
        (Request(prompt="a", logit_bias={"5": 1, 5: 1}), "logit_bias"),
        (Request(prompt="a", logit_bias={"5": 101}), 'logit_bias: {"5": 101}, .*numbers from -100 to 100'),
        (Request(prompt="a", logit_bias={"x": 1}), "logit_bias"),
        (Request(prompt="a", logit_bias=[5]), r"logit_bias: \[5\]"),
        (Request(prompt="a", logprobs=21), "logprobs: 21, expected true, false or a whole number from 0 to 20"),
        (Request(prompt="a", min_tokens=1.5), "min_tokens: 1.5"),
        (Request(prompt="a", min_tokens=9, max_tokens=8), "min_tokens: 9, expected no more than max_tokens, 8"),
        (Request(prompt="a", seed=-1), "seed: -1, expected a whole number from 0 to 2.63 - 1"),
        (Request(prompt="a", seed=1 << 63), "seed"),
        (Request(prompt="a", n=0, temperature=1), "n: 0, expected a whole number from 1 to 128"),
        (Request(prompt="a", n=2), "n: 2, expected 1 at temperature 0"),
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"temperature": 200}, "call: temperature: 200, expected"),
        ({"seed": "x"}, 'call: seed: "x", expected'),
        ({"beam": 4}, "call: beam: 4, expected one of the sampling fields temperature, top_k"),
        ({"n": 2}, "prompt 0: n: 2, expected 1 at temperature 0"),
    ],
)
def test_the_calls_sampling_is_checked_too(model, call, message):
    with pytest.raises(InputError, match=message):
        aspire_jax.stream(model, ["fine"], **call)


def test_what_asks_for_nothing_is_plain(model):
    neutral = {"temperature": 0.0, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "n": 1}
    neutral |= {"min_tokens": 0}
    assert set(neutral) == set(SAMPLING) <= set(FIELDS)
    (r,) = prepare(model, [from_mapping({"prompt": "a", **neutral}, "here")])
    assert r.sampling.plain and r.sampling.seed is None
    for name, value in {"logit_bias": {"5": 1}, "logprobs": True, "min_tokens": 1, "presence_penalty": 1}.items():
        (r,) = prepare(model, [from_mapping({"prompt": "a", name: value}, "here")])
        assert r.sampling.greedy and not r.sampling.plain


def test_a_request_overrides_the_call_field_by_field(model):
    call = {"temperature": 0.7, "top_k": 5, "logprobs": 3, "seed": 9}
    requests = [Request(prompt="a"), Request(prompt="a", temperature=0, logprobs=False, logit_bias={"7": -1.5, 3: 2})]
    one, two = prepare(model, requests, sampling=call)
    assert one.sampling == SamplingParams(temperature=0.7, top_k=5, logprobs=3, seed=9)
    assert two.sampling == SamplingParams(top_k=5, logit_bias=((3, 2.0), (7, -1.5)))


def test_every_completion_has_a_seed_of_its_own(model):
    requests = [Request(prompt="a", n=2), Request(prompt="a", temperature=0, n=1), Request(prompt="b", seed=7, n=3)]
    done = prepare(model, [*requests, Request(prompt="c")], sampling={"temperature": 1, "seed": (1 << 63) - 1})
    places = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0)]
    assert [(r.id, r.choice) for r in done] == places and all(r.index == r.id for r in done)
    assert [r.sampling.seed for r in done] == [(1 << 63) - 1, 0, None, 7, 8, 9, 5]
    fresh = [prepare(model, ["a", "b"], sampling={"temperature": 1}) for _ in range(2)]
    assert [b.sampling.seed - a.sampling.seed for a, b in fresh] == [1, 1]
    assert fresh[0][0].sampling.seed != fresh[1][0].sampling.seed


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
