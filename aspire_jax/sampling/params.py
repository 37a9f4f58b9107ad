"""A request's sampling parameters on the host: names and bounds, and the arrays that an engine takes them as."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import numpy as np

from aspire_jax import checks
from aspire_jax.sampling.rows import Acceptance, Settings, Support

SEEDS = 1 << 63
MOST_LOGPROBS, MOST_CHOICES = 20, 128
# Sizes of the buffers for alternatives: requests that want about as many share an engine's programs.
_LOGPROB_SIZES = (0, 5, MOST_LOGPROBS)


class SamplingFields(TypedDict, total=False):
    """What a request, or a call for all of its requests, may say about sampling; see `Request`."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[Any, float] | None
    min_tokens: int | None
    logprobs: int | bool | None
    seed: int | None
    n: int | None


SAMPLING = tuple(SamplingFields.__annotations__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Checked sampling parameters; see `Request` and, for what each does, `aspire_jax.sampling`.

    Attributes:
      logprobs: alternatives to report for each token; None where no log-probabilities are wanted.
      seed: None where the request leaves it open.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1

    @property
    def greedy(self) -> bool:
        """Whether the seed changes nothing."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether tokens must be counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def plain(self) -> bool:
        """Whether a greedy engine serves it."""
        return self.greedy and not (self.penalised or self.logit_bias or self.min_tokens or self.logprobs is not None)


def checked(fields: Mapping[str, Any], where: str, vocabulary: int) -> SamplingParams:
    """`fields` of the names in `SamplingFields`, None where not given, as parameters.

    Raises:
      InputError: names the field, its value and what was expected.
    """
    given = {name: value for name, value in fields.items() if value is not None}

    def real(name: str, low: float, high: float, expected: str) -> None:
        value = given.get(name)
        if value is not None:
            checks.check(checks.number(value) and low <= value <= high, where, name, value, expected)
            given[name] = float(value)

    def count(name: str, low: int, high: int, expected: str) -> None:
        value = given.get(name)
        if value is not None:
            checks.check(checks.whole(value) and low <= value <= high, where, name, value, expected)
            given[name] = int(value)

    for name, value in given.items():
        checks.check(name in SAMPLING, where, name, value, f"one of the sampling fields {', '.join(SAMPLING)}")
    real("temperature", 0, 100, "a number, 0 (greedy) or 0.01 to 100")
    warm = given.get("temperature", 0)
    checks.check(warm == 0 or warm >= 0.01, where, "temperature", warm, "a number, 0 (greedy) or 0.01 to 100")
    count("top_k", 0, 1 << 31, "a whole number from 0 (all tokens) to 2^31")
    real("top_p", 0, 1, "a number above 0, at most 1 (1: all tokens)")
    checks.check(given.get("top_p", 1) > 0, where, "top_p", 0, "a number above 0, at most 1 (1: all tokens)")
    real("min_p", 0, 1, "a number from 0 (all tokens) to 1")
    real("repetition_penalty", 0.01, 100, "a number from 0.01 to 100 (1: none)")
    real("presence_penalty", -2, 2, "a number from -2 to 2 (0: none)")
    real("frequency_penalty", -2, 2, "a number from -2 to 2 (0: none)")
    count("min_tokens", 0, 1 << 30, "a whole number from 0 to 2^30")
    if isinstance(given.get("logprobs"), bool):
        given["logprobs"] = 0 if given["logprobs"] else None
    count("logprobs", 0, MOST_LOGPROBS, f"true, false or a whole number from 0 to {MOST_LOGPROBS}")
    count("seed", 0, SEEDS - 1, "a whole number from 0 to 2^63 - 1")
    count("n", 1, MOST_CHOICES, f"a whole number from 1 to {MOST_CHOICES}")
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"], where, vocabulary)
    params = SamplingParams(**given)
    if params.n > 1 and params.greedy:
        raise checks.refuse(where, "n", params.n, "1 at temperature 0, where all answers would be equal")
    return params


def _biases(value: Any, where: str, vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits. The keys of a JSON object are text."""
    expected = f"an object of token ids (0 to {vocabulary - 1}) with numbers from -100 to 100"
    checks.check(isinstance(value, Mapping), where, "logit_bias", value, expected)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token = int(key) if digits or checks.whole(key) else -1
        good = 0 <= token < vocabulary and token not in biases and checks.number(bias) and -100 <= bias <= 100
        checks.check(good, where, "logit_bias", {str(key): bias}, expected)
        biases[token] = float(bias)
    return tuple(sorted(biases.items()))


def fresh_seed() -> int:
    """A seed that nobody chose, short enough to be typed."""
    return secrets.randbits(32)


def support_for(requests: Iterable[SamplingParams], acceptance: Acceptance = "coupled") -> Support | None:
    """The least an engine must support to serve `requests`; None where greedy decoding does."""
    asked = [r for r in requests if not r.plain]
    logprobs = [r.logprobs for r in asked if r.logprobs is not None]
    support = Support(
        acceptance=acceptance if any(not r.greedy for r in asked) else "coupled",
        penalties=any(r.penalised for r in asked),
        bias=any(r.logit_bias for r in asked),
        logprobs=next(size for size in _LOGPROB_SIZES if size >= max(logprobs)) if logprobs else None,
    )
    return support if asked else None


def settings(support: Support, params: SamplingParams, prompt: np.ndarray, vocabulary: int) -> Settings:
    """What `admit` takes: one request's parameters as numpy arrays. prompt: [n] its tokens."""
    seed = params.seed or 0
    bias = np.zeros((vocabulary if support.bias else 0,), np.float32)
    seen = np.zeros((vocabulary if support.penalties else 0,), np.int32)
    if support.bias:
        for token, value in params.logit_bias:
            bias[token] = value
    if support.penalties:
        seen[prompt] = 1
    values = {
        "key": np.asarray([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        "temperature": np.float32(params.temperature),
        "top_k": np.int32(min(params.top_k or vocabulary, vocabulary)),
        "top_p": np.float32(params.top_p),
        "min_p": np.float32(params.min_p),
        "repetition": np.float32(params.repetition_penalty),
        "presence": np.float32(params.presence_penalty),
        "frequency": np.float32(params.frequency_penalty),
        "min_tokens": np.int32(params.min_tokens),
        "logprobs": np.bool_(params.logprobs is not None),
        "bias": bias,
        "seen": seen,
    }
    return Settings(**values)  # type: ignore[arg-type]  # numpy arrays, which become jax's on the way in
