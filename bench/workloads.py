"""Prompts for the benchmarks: tasks of published files (`datasets.read`), or text that Python carries, by length."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np

from aspire_jax.cli import demo_prompts
from aspire_jax.errors import InputError
from aspire_jax.loading import Model
from aspire_jax.request import Prepared, Request, prepare
from bench import datasets

# Input lengths in tokens, from (inclusive) and to (exclusive): the paper's for LongBench and LongBench v2, and
# smaller ones for small models.
BUCKETS = {
    "1k-2k": (1_000, 2_000),
    "2k-4k": (2_000, 4_000),
    "4k-8k": (4_000, 8_000),
    "16k-18k": (16_000, 18_000),
    "30k-40k": (30_000, 40_000),
    "80k-100k": (80_000, 100_000),
}

Length = int | tuple[int, int]


def length(text: str) -> Length:
    """An argument's type: tokens (7000 or 7k), or a bucket from..to (16k-18k or 16000-18000)."""
    values = [
        int(number) * (1000 if thousand else 1)
        for number, thousand in re.findall(r"(\d+)(k?)(?:-|$)", text)
        if re.fullmatch(r"\d+k?(-\d+k?)?", text)
    ]
    if len(values) == 1 and values[0] > 0:
        return values[0]
    if len(values) == 2 and 0 < values[0] < values[1]:
        return values[0], values[1]
    raise argparse.ArgumentTypeError(f"{text!r}, expected tokens like 7000 or a bucket like {', '.join(BUCKETS)}")


def name(given: Length) -> str:
    """What tables call a length."""
    if isinstance(given, int):
        return f"{given:,}"
    known = [key for key, bounds in BUCKETS.items() if bounds == given]
    return known[0] if known else f"{given[0]}-{given[1]}"


def read(files: Sequence[str]) -> list[Request]:
    """The tasks of benchmark files as requests, in order; errors as `datasets.read`."""
    return [item.request() for item in datasets.read(files)]


def choose(
    model: Model, data: Sequence[str], count: int, given: Length, max_tokens: int, seed: int = 0
) -> list[Prepared]:
    """`count` prompts of a length: as `near`, or for a bucket those of `data` that lie in it, whole, chosen by `seed`.

    Raises:
      InputError: fewer prompts in the data than asked for, or a bucket without data.
    """
    if isinstance(given, int):
        return near(model, data, count, given, max_tokens, seed)
    if not data:
        raise InputError(f"a bucket of lengths ({name(given)}) without --data, expected files of prompts")
    low, high = given
    if high - 1 + max_tokens > model.config.max_length:
        most = model.config.max_length - max_tokens
        raise InputError(f"bucket {name(given)}, expected lengths of at most {most} tokens for {model.name}")
    ready = _ready(model, tuple(data), max_tokens)
    # Longer prompts are cut to the model's length there and stay out of the bucket.
    inside = [r for r in ready if low <= len(r.tokens) < high]
    if len(inside) < count:
        raise InputError(f"data: {len(inside)} prompts of {low} to {high} tokens, expected {count}")
    rng = np.random.default_rng(seed)
    chosen = [inside[i].tokens for i in sorted(rng.choice(len(inside), count, replace=False))]
    return _endless(model, chosen, max_tokens)


def near(model: Model, data: Sequence[str], count: int, context: int, max_tokens: int, seed: int = 0) -> list[Prepared]:
    """`count` prompts of about `context` tokens, chosen by `seed`.

    Those of `data` that are long enough, cut in the middle to `context` less up to 5 %, so that lengths differ. Text of
    the Python installation where there is no data, other text for every seed. Stop tokens are ignored, so that every
    row decodes to the end.

    Raises:
      InputError: fewer prompts in the data than asked for, or prompts that the model has no room for.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"model {model.name}: no tokenizer, expected a folder converted with its tokenizer")
    if context + max_tokens > model.config.max_length:
        most = model.config.max_length - max_tokens
        raise InputError(
            f"context: {context} tokens, expected at most {most} ({model.config.max_length} less the answer)"
        )
    if not data:
        made = demo_prompts.requests(tokenizer, context, count * (seed + 1))[count * seed :]
        made = [dataclasses.replace(r, ignore_eos=True) for r in made]
        return prepare(model, made, max_tokens=max_tokens, truncate=True)
    long = [r for r in _ready(model, tuple(data), max_tokens) if len(r.tokens) >= context]
    if len(long) < count:
        raise InputError(f"data: {len(long)} prompts of at least {context} tokens, expected {count}")
    rng = np.random.default_rng(seed)
    chosen = []
    for r in (long[i] for i in sorted(rng.choice(len(long), count, replace=False))):
        length = context - int(rng.integers(0, max(context // 20, 1)))
        head = length // 2
        chosen.append(np.concatenate([r.tokens[:head], r.tokens[len(r.tokens) - (length - head) :]]))
    return _endless(model, chosen, max_tokens)


def random_tokens(model: Model, count: int, context: int, max_tokens: int, seed: int = 0) -> list[Prepared]:
    """Prompts of uniformly random tokens, on which little is accepted; no stop tokens, so that all run to the end."""
    rng = np.random.default_rng(seed)
    return _endless(model, list(rng.integers(0, model.config.vocab_size, (count, context))), max_tokens)


@functools.lru_cache(maxsize=4)
def _ready(model: Model, data: tuple[str, ...], max_tokens: int) -> list[Prepared]:
    """The files' prompts, tokenised once for all seeds and lengths."""
    return prepare(model, read(data), max_tokens=max_tokens, truncate=True)


def _endless(model: Model, prompts: Sequence[np.ndarray], max_tokens: int) -> list[Prepared]:
    requests = [Request(token_ids=[int(t) for t in tokens], ignore_eos=True) for tokens in prompts]
    return prepare(model, requests, max_tokens=max_tokens)
