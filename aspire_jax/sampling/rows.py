"""What sampling needs to know of every slot, as arrays: a request's parameters never change a program."""

from __future__ import annotations

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp

Acceptance = Literal["coupled", "rejection"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "rejection")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
    """What an engine's steps can serve beyond greedy decoding; decides which buffers exist (static).

    Temperature, top-k, top-p, min-p, seeds and min tokens are always served.

    Attributes:
      acceptance: how drafts of sampled requests are accepted, see `aspire_jax.sampling`.
      penalties: repetition, presence and frequency penalties, for which tokens are counted: [B, vocab_size] int32.
      bias: logit biases: [B, vocab_size] float32.
      logprobs: most alternatives to report for each token; None where no request wants log-probabilities.
    """

    acceptance: Acceptance = "coupled"
    penalties: bool = False
    bias: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.acceptance not in ACCEPTANCES:
            raise ValueError(f"acceptance: {self.acceptance!r}, expected one of {', '.join(ACCEPTANCES)}")


@flax.struct.dataclass
class Settings:
    """A request's parameters; [B, ...] for all slots, without the leading axis for the one that is admitted.

    Attributes:
      key: [B, 2] uint32, the seed's high and low half.
      temperature: [B] float32, 0 for greedy; top_k: [B] int32, the vocabulary's size where off; top_p (1 where off),
        min_p (0 where off): [B] float32.
      repetition (1 where off), presence, frequency: [B] float32.
      min_tokens: [B] int32.
      logprobs: [B] bool, whether they are wanted.
      bias: [B, V] float32, or [B, 0] where the engine serves none.
      seen: [B, V] int32, or [B, 0] where the engine serves no penalties: 2 x times emitted + 1 if in the prompt.
    """

    key: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    min_tokens: jax.Array
    logprobs: jax.Array
    bias: jax.Array
    seen: jax.Array

    @property
    def penalised(self) -> jax.Array:
        """[B] bool, rows with any penalty."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)


@flax.struct.dataclass
class Sampling:
    """The slots' part of the engine's state that sampling owns.

    Attributes:
      settings: of every slot.
      proposals: [B, d_max, V] float32, the distribution that each draft was drawn from (`rejection` only, else empty).
      logprob: [B, max_new] float32, of each token emitted; best_token: [B, max_new, n] int32 and best_logprob:
        [B, max_new, n] float32, the n most probable tokens in its place. Empty where the engine serves none.
    """

    settings: Settings
    proposals: jax.Array
    logprob: jax.Array
    best_token: jax.Array
    best_logprob: jax.Array


def greedy(support: Support, vocabulary: int, *lead: int) -> Settings:
    """Settings that ask for nothing, with leading axes `lead`."""

    def full(value: float, dtype: type = jnp.float32) -> jax.Array:
        return jnp.full(lead, value, dtype)

    return Settings(
        key=jnp.zeros((*lead, 2), jnp.uint32),
        temperature=full(0),
        top_k=full(vocabulary, jnp.int32),
        top_p=full(1),
        min_p=full(0),
        repetition=full(1),
        presence=full(0),
        frequency=full(0),
        min_tokens=full(0, jnp.int32),
        logprobs=full(False, jnp.bool_),
        bias=jnp.zeros((*lead, vocabulary if support.bias else 0), jnp.float32),
        seen=jnp.zeros((*lead, vocabulary if support.penalties else 0), jnp.int32),
    )


def init(support: Support, vocabulary: int, batch: int, max_new: int, d_max: int) -> Sampling:
    """Free slots."""
    kept = max_new if support.logprobs is not None else 0
    best = (batch, kept, support.logprobs or 0)
    drafts = d_max if support.acceptance == "rejection" else 0
    return Sampling(
        settings=greedy(support, vocabulary, batch),
        proposals=jnp.zeros((batch, drafts, vocabulary if drafts else 0), jnp.float32),
        logprob=jnp.zeros((batch, kept), jnp.float32),
        best_token=jnp.zeros(best, jnp.int32),
        best_logprob=jnp.zeros(best, jnp.float32),
    )


def admit(sampling: Sampling, row: jax.Array, settings: Settings) -> Sampling:
    """Takes in one request's settings (no leading axis). row: [B] bool, its slot."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(row.reshape(-1, *(1,) * (old.ndim - 1)), jnp.asarray(new, old.dtype)[None], old)

    return dataclasses.replace(sampling, settings=jax.tree.map(put, sampling.settings, settings))
