"""Prompts for the benchmarks: files of `{"dataset", "id", "prompt", "answers"}` lines, or text Python carries."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aspire_jax.cli import demo_prompts
from aspire_jax.errors import InputError
from aspire_jax.loading import Model
from aspire_jax.request import Prepared, Request, prepare


def read(files: Sequence[str]) -> list[Request]:
    """The prompts of JSONL files as chat requests, in order."""
    out = []
    for file in files:
        for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                out.append(Request(id=row["id"], messages=[{"role": "user", "content": row["prompt"]}]))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{file}:{number}: {error}, expected a JSON object with id and prompt") from error
    return out


def near(model: Model, data: Sequence[str], count: int, context: int, max_tokens: int, seed: int = 0) -> list[Prepared]:
    """`count` prompts of about `context` tokens, chosen by `seed`.

    Those of `data` that are long enough, cut in the middle to `context` less up to 5 %, so that lengths differ. Text of
    the Python installation where there is no data. Stop tokens are ignored, so that every row decodes to the end.

    Raises:
      InputError: fewer prompts in the data than asked for.
    """
    tokenizer = model.tokenizer
    assert tokenizer is not None
    if not data:
        made = demo_prompts.requests(tokenizer, context, count + seed)[seed:]
        made = [dataclasses.replace(r, ignore_eos=True) for r in made]
        return prepare(model, made, max_tokens=max_tokens, truncate=True)
    long = [r for r in prepare(model, read(data), max_tokens=max_tokens, truncate=True) if len(r.tokens) >= context]
    if len(long) < count:
        raise InputError(f"data: {len(long)} prompts of at least {context} tokens, expected {count}")
    rng = np.random.default_rng(seed)
    chosen = []
    for r in (long[i] for i in sorted(rng.choice(len(long), count, replace=False))):
        length = context - int(rng.integers(0, max(context // 20, 1)))
        head = length // 2
        chosen.append(np.concatenate([r.tokens[:head], r.tokens[len(r.tokens) - (length - head) :]]))
    requests = [Request(token_ids=[int(t) for t in tokens], ignore_eos=True) for tokens in chosen]
    return prepare(model, requests, max_tokens=max_tokens)


def random_tokens(model: Model, count: int, context: int, max_tokens: int, seed: int = 0) -> list[Prepared]:
    """Prompts of uniformly random tokens, on which little is accepted; no stop tokens, so that all run to the end."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.config.vocab_size, (count, context))
    requests = [Request(token_ids=[int(t) for t in row], ignore_eos=True) for row in tokens]
    return prepare(model, requests, max_tokens=max_tokens)
