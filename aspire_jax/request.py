"""Requests: what a user may ask for, checked field by field before any work is done.

Every refusal is one line: where it is, the field, its value, what was expected.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aspire_jax.errors import InputError
from aspire_jax.loading import Model

# Decoding is greedy. At temperature 0 these change nothing, so that any value of theirs can be served ...
_WITHOUT_EFFECT = ("top_p", "top_k", "min_p", "seed")
# ... and these would change the result, so that only the value that asks for nothing is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "min_tokens": (0,),
    "n": (1,),
    "best_of": (1,),
}


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
      sampling: further sampling fields by name ("temperature": 0, ...); one that greedy decoding cannot serve is
        refused.
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
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FIELDS = tuple(f.name for f in dataclasses.fields(Request) if f.name != "sampling")
SAMPLING = ("temperature", *_WITHOUT_EFFECT, *(name for name in _NEUTRAL if name != "temperature"))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A request that can be served: checked, tokenised, its limits settled.

    Attributes:
      index: its place; id: the request's, or `index`.
      tokens: the prompt [n] int32, n >= 1.
      max_new: tokens it may emit; less than asked for where the model's length ends earlier.
      stop, stop_ids: strings and tokens that end it.
    """

    index: int
    id: str | int
    tokens: np.ndarray
    max_new: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]


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
    """A request from a mapping of field names to JSON values; sampling fields stand beside the others.

    Raises:
      InputError: an unknown field.
    """
    for name in fields:
        if name not in FIELDS and name not in SAMPLING:
            raise _refuse(where, name, fields[name], f"one of the fields {', '.join((*FIELDS, *SAMPLING))}")
    sampling = {k: v for k, v in fields.items() if k in SAMPLING}
    # JSON's null stands for "not given".
    return Request(sampling=sampling, **{k: v for k, v in fields.items() if k in FIELDS and v is not None})


def prepare(
    model: Model,
    prompts: Iterable[Any],
    *,
    max_tokens: int = 128,
    stop: str | Sequence[str] = (),
    truncate: bool = False,
    max_length: int | None = None,
    places: Sequence[str] | None = None,
) -> list[Prepared]:
    """Checks and tokenises all prompts; nothing is computed before all of them can be served.

    Args:
      prompts: strings, lists of token ids, lists of messages, or requests.
      max_tokens, stop, truncate: for requests that do not say.
      max_length: tokens of prompt and completion together at most, where less than the model's.
      places: what error messages call each prompt ("in.jsonl:3"); "request ID" otherwise.

    Raises:
      InputError: names the prompt, the field, the value and what was expected.
    """
    if isinstance(prompts, str | bytes | Mapping | Request):
        raise InputError(f"prompts: one {type(prompts).__name__}, expected a list of prompts")
    longest = model.config.max_length
    if max_length is not None:
        _check(_whole(max_length) and 2 <= max_length <= longest, "call", "max_length", max_length, f"2 to {longest}")
        longest = max_length
    _check(_whole(max_tokens) and max_tokens >= 1, "call", "max_tokens", max_tokens, "a whole number of at least 1")
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
        defaults = dataclasses.replace(
            request,
            max_tokens=max_tokens if request.max_tokens is None else request.max_tokens,
            stop=stop if request.stop is None else request.stop,
            truncate=truncate if request.truncate is None else request.truncate,
        )
        done.append(_prepare(model, defaults, index, name, longest, where))
    if not done:
        raise InputError("prompts: an empty list, expected at least one prompt")
    return done


def _prepare(model: Model, r: Request, index: int, name: str | int, longest: int, where: str) -> Prepared:
    for field in ("ignore_eos", "truncate"):
        _check(isinstance(getattr(r, field), bool), where, field, getattr(r, field), "true or false")
    assert r.max_tokens is not None
    good = _whole(r.max_tokens) and r.max_tokens >= 1
    _check(good, where, "max_tokens", r.max_tokens, "a whole number of at least 1")
    _check_sampling(r.sampling, where)
    stop = (r.stop,) if isinstance(r.stop, str) else r.stop
    _check(_are_texts(stop), where, "stop", r.stop, "a string or a list of strings, none of them empty")
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
        tokens=np.asarray(tokens, np.int32),
        max_new=min(r.max_tokens, longest - len(tokens)),
        stop=tuple(stop),
        stop_ids=tuple(dict.fromkeys(ends)),
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


def _check_sampling(fields: Mapping[str, Any], where: str) -> None:
    for name, value in fields.items():
        if value is None:
            continue
        if name in _WITHOUT_EFFECT:
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            _check(number, where, name, value, "a number (of no effect at temperature 0)")
        elif name in _NEUTRAL:
            same = any(type(value) is type(n) or (_whole(n) and isinstance(value, float)) for n in _NEUTRAL[name])
            what = f"{json.dumps(_NEUTRAL[name][0])}: decoding is greedy, nothing else is supported yet"
            _check(same and value in _NEUTRAL[name], where, name, value, what)
        else:
            raise _refuse(where, name, value, f"one of the sampling fields {', '.join(SAMPLING)}")


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


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _encodable(text: str) -> bool:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check(good: bool, where: str, field: str, value: Any, expected: str) -> None:
    if not good:
        raise _refuse(where, field, value, expected)


def _refuse(where: str, field: str, value: Any, expected: str) -> InputError:
    shown = json.dumps(value, default=repr)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InputError(f"{where}: {field}: {shown}, expected {expected}")
