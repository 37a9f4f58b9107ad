"""Requests: what a user may ask for, checked field by field before any work is done.

Every refusal is one line: where it is, the field, its value, what was expected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aspire_jax.checks import check as _check
from aspire_jax.checks import encodable as _encodable
from aspire_jax.checks import refuse as _refuse
from aspire_jax.checks import whole as _whole
from aspire_jax.errors import InputError
from aspire_jax.loading import Model
from aspire_jax.sampling.params import SAMPLING, SEEDS, SamplingParams, checked, fresh_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to complete it. Exactly one of `prompt`, `messages` and `token_ids` is given.

    Attributes:
      prompt: text, completed as it stands.
      messages: a conversation ({"role", "content"} each), put through the model's chat template.
      token_ids: the prompt as tokens.
      id: returned with the completion; its number among the prompts where None.
      max_tokens: tokens to emit at most; None takes the call's.
      stop: strings that end the completion, in place of the call's where given.
      stop_token_ids: tokens that end it, besides the model's end tokens.
      ignore_eos: go on after the model's end tokens.
      truncate: cut a prompt that leaves less room than max_tokens; None takes the call's. The middle is dropped,
        equal parts of beginning and end stay. Half of the model's length is kept even where max_tokens asks for more.
      temperature: 0 for greedy decoding, 0.01 to 100. This and the following fields take the call's where None, and
        `aspire_jax.sampling` says what each of them does, and in which order.
      top_k: tokens to draw from, 0 for all.
      top_p: share of the probability to draw from, above 0, at most 1.
      min_p: least probability, relative to the best token's, 0 to 1.
      repetition_penalty: 0.01 to 100, 1 for none. presence_penalty, frequency_penalty: -2 to 2, 0 for none.
      logit_bias: what to add to tokens' logits, by token id: -100 to 100.
      min_tokens: tokens before which neither a stop token nor a stop string ends the completion.
      logprobs: report each token's log-probability, and those of so many most probable tokens: 0 to 20 (true is 0).
      seed: 0 to 2^63 - 1. The same seed gives the same text.
      n: completions of this prompt, 1 to 128; completion i has the seed `seed` + i.
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    id: str | int | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    truncate: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[Any, float] | None = None
    min_tokens: int | None = None
    logprobs: int | bool | None = None
    seed: int | None = None
    n: int | None = None


_STOP = "a string or a list of strings, none of them empty"
FIELDS = tuple(f.name for f in dataclasses.fields(Request))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A request that can be served: checked, tokenised, its limits settled.

    Attributes:
      index: its place; id: the request's, or `index`; choice: which of its completions this is.
      tokens: the prompt [n] int32, n >= 1.
      max_new: tokens it may emit; less than asked for where the model's length ends earlier.
      stop, stop_ids: strings and tokens that end it.
      sampling: its parameters; the seed is settled unless decoding is greedy.
    """

    index: int
    id: str | int
    choice: int
    tokens: np.ndarray
    max_new: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    sampling: SamplingParams


def as_request(prompt: Any, where: str) -> Request:
    """A string, a list of token ids, a list of messages or a request, as a request.

    Raises:
      InputError: none of these.
    """
    if isinstance(prompt, Request):
        return prompt
    if isinstance(prompt, str):
        return Request(prompt=prompt)
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt):
        return Request(messages=prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return Request(token_ids=prompt)
    raise _refuse(where, "prompt", prompt, "a string, token ids, messages or a Request")


def from_mapping(fields: Mapping[str, Any], where: str) -> Request:
    """A request from a mapping of field names to JSON values.

    Raises:
      InputError: an unknown field.
    """
    for name in fields:
        if name not in FIELDS:
            raise _refuse(where, name, fields[name], f"one of the fields {', '.join(FIELDS)}")
    return Request(**{k: v for k, v in fields.items() if v is not None})  # JSON's null stands for "not given"


def prepare(
    model: Model,
    prompts: Iterable[Any],
    *,
    max_tokens: int = 128,
    stop: str | Sequence[str] = (),
    truncate: bool = False,
    max_length: int | None = None,
    places: Sequence[str] | None = None,
    call: str = "call",
    sampling: Mapping[str, Any] | None = None,
) -> list[Prepared]:
    """Checks and tokenises all prompts; nothing is computed before all of them can be served.

    A request for several completions becomes as many prepared ones. Where a request has no seed, its completions are
    numbered on from the call's seed (or a fresh one) by the number of completions before them.

    Args:
      prompts: strings, lists of token ids, lists of messages, or requests.
      max_tokens, stop, truncate: for requests that do not say.
      max_length: tokens of prompt and completion together at most, where less than the model's.
      places: what error messages call each prompt ("in.jsonl:3"); "request ID" otherwise.
      call: what they call the arguments for all prompts; -- names them as options of a command line.
      sampling: fields of `SamplingFields`, for requests that do not say.

    Raises:
      InputError: names the prompt, the field, the value and what was expected.
    """
    if isinstance(prompts, str | bytes | Mapping | Request):
        raise InputError(f"prompts: one {type(prompts).__name__}, expected a list of prompts")
    longest = model.config.max_length
    if max_length is not None:
        _check(_whole(max_length) and 2 <= max_length <= longest, call, "max_length", max_length, f"2 to {longest}")
        longest = max_length
    _check(_whole(max_tokens) and max_tokens >= 1, call, "max_tokens", max_tokens, "a whole number of at least 1")
    vocabulary = model.config.vocab_size
    general = {**dict.fromkeys(SAMPLING), **(sampling or {})}
    base = checked({**general, "n": None}, call, vocabulary).seed
    checked({"n": general["n"], "temperature": 1}, call, vocabulary)  # whether it may be above 1, each request decides
    _check(_are_texts((stop,) if isinstance(stop, str) else stop), call, "stop", stop, _STOP)
    base = fresh_seed() if base is None else base
    done: list[Prepared] = []
    seen: dict[tuple[type, str | int], str] = {}
    for index, prompt in enumerate(prompts):
        where = places[index] if places is not None else f"prompt {index}"
        request = as_request(prompt, where)
        name = index if request.id is None else request.id
        named = _encodable(name) if isinstance(name, str) else _whole(name)
        _check(named, where, "id", name, "a string or a whole number")
        where = where if places is not None or request.id is None else f"request {name!r}"
        key = (type(name), name)
        _check(key not in seen, where, "id", name, f"an id of its own ({seen.get(key)} has it too)")
        seen[key] = where
        own = {name: getattr(request, name) for name in SAMPLING}
        params = checked({k: general[k] if v is None else v for k, v in own.items()}, where, vocabulary)
        defaults = dataclasses.replace(
            request,
            max_tokens=max_tokens if request.max_tokens is None else request.max_tokens,
            stop=stop if request.stop is None else request.stop,
            truncate=truncate if request.truncate is None else request.truncate,
        )
        prepared = _prepare(model, defaults, params, index, name, longest, where)
        first = base + len(done) if request.seed is None else int(request.seed)
        for choice in range(params.n):
            seed = None if params.greedy else (first + choice) % SEEDS
            done.append(dataclasses.replace(prepared, choice=choice, sampling=dataclasses.replace(params, seed=seed)))
    if not done:
        raise InputError("prompts: an empty list, expected at least one prompt")
    return done


def _prepare(
    model: Model, r: Request, sampling: SamplingParams, index: int, name: str | int, longest: int, where: str
) -> Prepared:
    for field in ("ignore_eos", "truncate"):
        _check(isinstance(getattr(r, field), bool), where, field, getattr(r, field), "true or false")
    assert r.max_tokens is not None
    good = _whole(r.max_tokens) and r.max_tokens >= 1
    _check(good, where, "max_tokens", r.max_tokens, "a whole number of at least 1")
    least = sampling.min_tokens
    _check(least <= r.max_tokens, where, "min_tokens", least, f"no more than max_tokens, {r.max_tokens}")
    stop = (r.stop,) if isinstance(r.stop, str) else r.stop
    _check(_are_texts(stop), where, "stop", r.stop, _STOP)
    assert stop is not None
    vocabulary = model.config.vocab_size
    ids = r.stop_token_ids
    _check(_are_ids(ids, vocabulary), where, "stop_token_ids", ids, f"a list of token ids from 0 to {vocabulary - 1}")
    _check(model.tokenizer is not None or not stop, where, "stop", stop, "a model with a tokenizer")
    tokens = _tokenise(model, r, where)
    room = longest - r.max_tokens
    if r.truncate and len(tokens) > room:
        tokens = drop_middle(tokens, max(room, longest // 2, 1))
    given = "prompt" if r.prompt is not None else "messages" if r.messages is not None else "token_ids"
    if len(tokens) >= longest:
        raise InputError(f"{where}: {given}: {len(tokens)} tokens, expected fewer than {longest}, or truncate")
    ends = (*(() if r.ignore_eos else model.config.eos_ids), *(int(i) for i in ids))
    return Prepared(
        index=index,
        id=name,
        choice=0,
        tokens=np.asarray(tokens, np.int32),
        max_new=min(r.max_tokens, longest - len(tokens)),
        stop=tuple(stop),
        stop_ids=tuple(dict.fromkeys(ends)),
        sampling=sampling,
    )


def drop_middle(tokens: Sequence[int], keep: int) -> list[int]:
    """The first and the last tokens, `keep` in all; as LongBench truncates."""
    if len(tokens) <= keep:
        return list(tokens)
    tail = keep // 2
    return [*tokens[: keep - tail], *tokens[len(tokens) - tail :]]


def _tokenise(model: Model, r: Request, where: str) -> list[int]:
    given = [f for f in ("prompt", "messages", "token_ids") if getattr(r, f) is not None]
    if len(given) != 1:
        raise InputError(f"{where}: {' and '.join(given) or 'no prompt'}, expected one of prompt, messages, token_ids")
    if r.token_ids is not None:
        ids, vocabulary = r.token_ids, model.config.vocab_size
        good = _are_ids(ids, vocabulary) and len(ids) > 0
        _check(good, where, "token_ids", ids, f"token ids from 0 to {vocabulary - 1}, at least one")
        return [int(i) for i in ids]
    if model.tokenizer is None:
        raise InputError(f"{where}: {given[0]}: model {model.name} has no tokenizer, expected token_ids")
    if r.prompt is not None:
        _check(_are_texts([r.prompt]), where, "prompt", r.prompt, "text, not empty")
        tokens = model.tokenizer.encode(r.prompt)
    else:
        assert r.messages is not None
        what = 'a list of {"role": text, "content": text}, not empty'
        _check(_are_messages(r.messages), where, "messages", r.messages, what)
        try:
            tokens = model.tokenizer.encode_chat(r.messages)
        except InputError as error:
            raise InputError(f"{where}: messages: {error}") from error
    if not tokens or max(tokens) >= model.config.vocab_size:
        raise InputError(f"{where}: {given[0]}: no tokens that model {model.name} knows, expected text it can read")
    return tokens


def _are_texts(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(v, str) and v and _encodable(v) for v in values)


def _are_ids(values: Any, vocabulary: int) -> bool:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        return False
    return all(_whole(i) and 0 <= i < vocabulary for i in values)


def _are_messages(values: Any) -> bool:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        return False
    for message in values:
        if not isinstance(message, Mapping):
            return False
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return False
        if not all(_encodable(value) for value in message.values() if isinstance(value, str)):
            return False
    return True
