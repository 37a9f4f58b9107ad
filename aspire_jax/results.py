"""What serving hands back: completions, pieces of them as they come, and the figures of the whole run."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]


def ratio(part: float, whole: float) -> float:
    """`part` / `whole`, 0 where there is no whole."""
    return part / whole if whole else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What the engine did for one request.

    Where a stop string ended the request, the counts go on to the end of the run of steps in which it appeared: the
    engine learns of it only then.

    Attributes:
      steps: steps in which the request drafted or verified.
      drafted, accepted: tokens drafted and verified; those of them that were emitted.
      verifications: steps in which it verified.
      emitted: tokens emitted.
    """

    steps: int
    drafted: int
    accepted: int
    verifications: int
    emitted: int

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per verification: the accepted drafts and one token of the target. 1 without drafts."""
        return ratio(self.emitted, self.verifications)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token's natural log-probability under the model's raw logits.

    Attributes:
      token_id, logprob: the token that was emitted.
      best: the most probable tokens in its place and their log-probabilities, best first, as many as were asked for.
    """

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        best = [{"token_id": token, "logprob": value} for token, value in self.best]
        return {"token_id": self.token_id, "logprob": self.logprob, "best": best}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One request's answer, or one of them.

    Attributes:
      id: the request's own, or its number.
      index: its place among the prompts given.
      choice: which of the request's completions it is, from 0.
      seed: what it was drawn with, so that it can be drawn again; None where decoding was greedy.
      text: the answer, without the stop string or the stop token that ended it.
      token_ids: the answer's tokens, with the stop token where one ended it, and up to the token that completed the
        stop string where one did.
      finish_reason: "stop", or "length" for max_tokens or the model's maximum length.
      prompt_tokens: tokens of the prompt (after truncation, where asked for).
      stats: what the engine did for it.
      margins: [len(token_ids)] float32, how far each token's logit lay above the second best; of a sampled token, how
        much logits must change for it to be another (see `aspire_jax.sampling`; inf under `rejection`).
      logprobs: of each token, where the request asked for them.
      rounds: [stats.verifications, 2] int, drafts held and tokens emitted by each verification, in order.
    """

    id: str | int
    index: int
    choice: int = 0
    seed: int | None = None
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats
    margins: np.ndarray
    rounds: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2), int))
    logprobs: list[TokenLogprob] | None = None

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompt and of the completion."""
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)}

    def as_dict(self) -> dict[str, Any]:
        """What the command line writes for it."""
        s = self.stats
        logprobs = {} if self.logprobs is None else {"logprobs": [token.as_dict() for token in self.logprobs]}
        return {
            "id": self.id,
            "choice": self.choice,
            "seed": self.seed,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            **logprobs,
            "stats": {
                "steps": s.steps,
                "drafted": s.drafted,
                "accepted": s.accepted,
                "verifications": s.verifications,
                "mean_accepted_length": round(s.mean_accepted_length, 4),
            },
        }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A piece of an answer. The pieces of a request concatenate to its completion.

    Attributes:
      id, index: the request's; choice: which of its completions this belongs to.
      text: new text, perhaps empty: characters that are not whole yet, or that may begin a stop string, wait.
      token_ids: new tokens.
      completion: the whole answer with the request's last piece, None before.
    """

    id: str | int
    index: int
    text: str
    token_ids: list[int]
    choice: int = 0
    completion: Completion | None = None


@dataclasses.dataclass(kw_only=True)
class Report:
    """Figures of a whole run, kept up to date while it goes on. Compiling is in neither of the other times.

    Attributes:
      stage: "compile", "prefill" or "decode", whichever goes on.
      requests, finished: completions asked for (a request may ask for several), and finished.
      prompt_tokens: tokens to prefill; prefilled: those computed; reused: those another prompt had in common, copied.
      completion_tokens: tokens of the completions so far; planned_tokens: most that may come.
      steps: steps of the batch.
      drafted, accepted, verifications, emitted: sums of `Stats`.
      compile_seconds, prefill_seconds, decode_seconds: wall time.
      work: [4] work done while decoding (see `costs.work`), padding and copies as the step shapes count them.
      cost: [4] fitted coefficients of the cost model (see `costs.CostModel`).
    """

    stage: Literal["compile", "prefill", "decode"] = "compile"
    requests: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    prefilled: int = 0
    reused: int = 0
    completion_tokens: int = 0
    planned_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    emitted: int = 0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    work: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    cost: tuple[float, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second of decoding, all requests together."""
        return ratio(self.completion_tokens, self.decode_seconds)

    @property
    def acceptance(self) -> float:
        """Accepted drafts / verified drafts."""
        return ratio(self.accepted, self.drafted)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per verification, all requests together."""
        return ratio(self.emitted, self.verifications)

    def as_dict(self) -> dict[str, Any]:
        """Fields and rates, for JSON."""
        rates = ("tokens_per_second", "acceptance", "mean_accepted_length")
        fields = dataclasses.asdict(self)
        del fields["stage"]
        return {**fields, **{name: getattr(self, name) for name in rates}}
