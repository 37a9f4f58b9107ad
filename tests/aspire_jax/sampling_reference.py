"""The contract of `aspire_jax.sampling` once more, in numpy, with sorts and float64, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.sampling import noise
from aspire_jax.sampling.rows import Settings


class Choice(NamedTuple):
    """A token, by how much its score won, and its log-probability before any processing."""

    token: int
    gap: float
    logprob: float


def processed(
    s: Settings, logits: np.ndarray, prompt: Sequence[int], answer: Sequence[int], stop: Sequence[int]
) -> np.ndarray:
    """Steps 1 to 4 of the contract."""
    x = np.asarray(logits, np.float64).copy()
    if s.bias.size:
        x += np.asarray(s.bias, np.float64)
    repetition = float(s.repetition)
    for token in {*prompt, *answer}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(answer):
        x[token] -= float(s.presence) + float(s.frequency) * answer.count(token)
    if len(answer) < int(s.min_tokens):
        x[[t for t in stop if t < len(x)]] = -np.inf
    return x / (float(s.temperature) or 1.0)


def kept(s: Settings, x: np.ndarray) -> np.ndarray:
    """Steps 5 to 7: which tokens stay, bool [V]."""
    stay = x > -np.inf
    if not float(s.temperature):
        return stay
    k = int(s.top_k)
    if k < stay.sum():
        stay &= x >= np.sort(x)[-k]
    weights = np.where(stay, np.exp(x - x.max()), 0.0)
    weights /= weights.sum()
    if float(s.top_p) < 1:
        values = np.unique(x[stay])[::-1]
        mass = np.cumsum([weights[x == v].sum() for v in values])
        stay &= x >= values[np.argmax(mass >= float(s.top_p))]
    if float(s.min_p) > 0:
        stay &= x >= x.max() + np.log(float(s.min_p))
    return stay


def probabilities(s: Settings, x: np.ndarray) -> np.ndarray:
    """Step 8: the distribution a token is drawn from, [V]."""
    weights = np.where(kept(s, x), np.exp(x - x.max()), 0.0)
    return weights / weights.sum()


_gumbel = jax.jit(lambda key, at, v: noise.gumbel(noise.keys_at(key[None], at[None]), v)[0], static_argnums=2)


def choose(
    s: Settings, logits: np.ndarray, prompt: Sequence[int], answer: Sequence[int], stop: Sequence[int]
) -> Choice:
    """The token after `answer`, under coupled acceptance."""
    x = processed(s, logits, prompt, answer, stop)
    score = np.where(kept(s, x), x, -np.inf)
    if float(s.temperature):
        score = score + np.asarray(_gumbel(s.key, jnp.int32(len(prompt) + len(answer)), len(x)), np.float64)
    token = int(np.argmax(score))
    raw = np.asarray(logits, np.float64)
    second = np.max(np.delete(score, token))
    return Choice(token, float(score[token] - second), raw[token] - raw.max() - np.log(np.exp(raw - raw.max()).sum()))


Logits = Callable[[Sequence[int]], np.ndarray]


def answer_of(
    logits_after: Logits, s: Settings, prompt: Sequence[int], new: int, stop: Sequence[int] = ()
) -> list[Choice]:
    """A whole answer, up to a stop token or `new` tokens."""
    choices: list[Choice] = []
    while len(choices) < new and not (choices and choices[-1].token in stop):
        tokens = [c.token for c in choices]
        choices.append(choose(s, logits_after([*prompt, *tokens]), prompt, tokens, stop))
    return choices
