"""Several methods on the same prompts: are the answers the same, and which was faster?

The prompts are prefilled once. Decoding only appends to the cache, so each method takes the cache over from the one
before and starts again behind the prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aspire_jax.cache import KVCache
from aspire_jax.costs import Fit
from aspire_jax.draft_length import OracleDraftLength
from aspire_jax.engine import Engine
from aspire_jax.host import Stream
from aspire_jax.loading import Model
from aspire_jax.request import Prepared
from aspire_jax.results import Completion, Report, ratio
from aspire_jax.sizing import engine_for
from aspire_jax.tracing import Replay, record_pass

# How close the two best logits must lie for rounding to exchange them: logits are some tens, and two orders of
# summation differ by a few hundred units in the last place of a float32, a few of a 16-bit float.
NEAR_TIE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 0.25}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Where an answer departs from the reference.

    Attributes:
      index: the request's; choice: which of its completions.
      position: its first token that differs.
      margin: how far the chosen token's logit lay above the second best there, in the method where that is more; how
        far it was from another token being drawn, where it was sampled (see `Completion`).
      near_tie: whether rounding explains it.
    """

    index: int
    position: int
    margin: float
    near_tie: bool
    choice: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare` found.

    Attributes:
      reference, candidate: the answers of both methods, in the order of the prompts.
      reference_reports, candidate_reports: figures of each round.
      differences: answers that are not equal, token by token.
    """

    reference: list[Completion]
    candidate: list[Completion]
    reference_reports: list[Report]
    candidate_reports: list[Report]
    differences: list[Difference]

    @property
    def prefill(self) -> Report:
        """Figures of the run that prefilled."""
        return self.reference_reports[0]

    @property
    def best(self) -> tuple[Report, Report]:
        """Each method's fastest round: a shared machine only ever adds time."""
        fastest = [max(r, key=lambda r: r.tokens_per_second) for r in (self.reference_reports, self.candidate_reports)]
        return fastest[0], fastest[1]

    @property
    def speedup(self) -> float:
        """Decoded tokens per second, candidate to reference."""
        reference, candidate = self.best
        return ratio(candidate.tokens_per_second, reference.tokens_per_second)

    @property
    def exact(self) -> int:
        """Answers that are equal."""
        return len(self.reference) - len(self.differences)

    @property
    def defects(self) -> list[Difference]:
        """Differences that rounding does not explain."""
        return [d for d in self.differences if not d.near_tie]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request's tokens of one run of steps.

    Attributes:
      index: the request's.
      tokens: how many came.
      decoding: seconds that the run took.
      waiting: seconds since the run before ended; more than `decoding` where prompts were admitted between.
    """

    index: int
    tokens: int
    decoding: float
    waiting: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One method over all prompts once.

    Attributes:
      answers: in the order of the prompts.
      report: figures of the run.
      arrivals: when their tokens came.
    """

    answers: list[Completion]
    report: Report
    arrivals: list[Arrival]


def in_turns(
    model: Model,
    requests: Sequence[Prepared],
    engines: Mapping[str, Engine],
    *,
    rounds: int = 1,
    cache: KVCache | None = None,
    fit: Fit | None = None,
    progress: Callable[[str, Report], None] | None = None,
) -> tuple[dict[str, list[Run]], KVCache, Fit]:
    """Decodes `requests`, all at a time, with every engine in turns, so that a drifting machine drifts for all alike.

    Args:
      engines: by the methods' names; alike but for their policies. Each has a slot for every request. An oracle's first
        pass records its trace; it is no part of its runs.
      rounds: how often each decodes.
      cache: one that holds the prompts already, from an earlier call; taken over.
      fit: of the cost model, shared by all.
      progress: called with the method's name and its report.

    Returns:
      the runs of each engine, and the cache and the fit to go on with.
    """
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    hooks: dict[str, Replay] = {}
    for turn in range(rounds):
        for name, engine in engines.items():

            def tell(report: Report, name: str = name, compiles: bool = turn == 0) -> None:
                if progress is not None and (compiles or report.stage != "compile"):
                    progress(name, report)

            if isinstance(engine.draft_length, OracleDraftLength) and name not in hooks:
                trace, cache = record_pass(model, requests, engine, name, cache)
                hooks[name] = Replay(trace, engine, requests)
            stream = Stream(
                model, requests, engine, fit=fit, progress=tell, cache=cache, keep_cache=True, hooks=hooks.get(name)
            )
            runs[name].append(follow(stream))
            cache, fit = stream.cache, stream.fit
    assert cache is not None and fit is not None, "no engines or no rounds"
    return runs, cache, fit


def follow(stream: Stream) -> Run:
    """Runs a stream to its end, and notes when tokens came."""
    answers, arrivals = [], []
    ended = decoded = decoding = waiting = 0.0
    for chunk in stream:
        report = stream.report
        if report.decode_seconds > decoded:  # the first piece of another run
            now = report.prefill_seconds + report.decode_seconds
            decoding, waiting = report.decode_seconds - decoded, now - ended
            decoded, ended = report.decode_seconds, now
        if chunk.token_ids:
            arrivals.append(Arrival(index=chunk.index, tokens=len(chunk.token_ids), decoding=decoding, waiting=waiting))
        if chunk.completion is not None:
            answers.append(chunk.completion)
    answers.sort(key=lambda answer: (answer.index, answer.choice))
    return Run(answers=answers, report=stream.report, arrivals=arrivals)


def compare(
    model: Model,
    requests: Sequence[Prepared],
    *,
    reference: str = "autoregressive",
    candidate: str = "aspire",
    options: Mapping[str, Any] | None = None,
    implementation: str | None = None,
    rounds: int = 2,
    progress: Callable[[str, Report], None] | None = None,
) -> Comparison:
    """Decodes `requests`, all at a time, with both methods in turns.

    Sampled requests are comparable, too: the same seeds give the same tokens (`coupled` acceptance).

    Args:
      requests: as `request.prepare` made them.
      options: of the candidate's policies.
      implementation: of attention, for both; None takes the best for the device.
      rounds: how often each method decodes.
      progress: called with the method's name and its report.

    Raises:
      ValueError: no such method or option, or an implementation that cannot serve.
    """
    slots = len(requests)
    engines = {
        reference: engine_for(model, requests, method=reference, slots=slots, implementation=implementation),
        candidate: engine_for(
            model, requests, method=candidate, slots=slots, options=options, implementation=implementation
        ),
    }
    runs, _, _ = in_turns(model, requests, engines, rounds=rounds, progress=progress)
    return comparison(runs[reference], runs[candidate], NEAR_TIE[model.dtype])


def comparison(reference: Sequence[Run], candidate: Sequence[Run], near_tie: float) -> Comparison:
    """The candidate's runs against the reference's; its answer is equal only if it is in every round."""
    found: dict[tuple[int, int], Difference] = {}
    for run in candidate:
        for difference in differences(reference[0].answers, run.answers, near_tie):
            key = (difference.index, difference.choice)
            found |= {key: difference} if key not in found or not difference.near_tie else {}
    return Comparison(
        reference=reference[0].answers,
        candidate=candidate[-1].answers,
        reference_reports=[run.report for run in reference],
        candidate_reports=[run.report for run in candidate],
        differences=[found[key] for key in sorted(found)],
    )


def differences(reference: Sequence[Completion], candidate: Sequence[Completion], near_tie: float) -> list[Difference]:
    """The answers that are not equal; a difference is a near tie where neither method saw a margin above `near_tie`."""
    out = []
    for a, b in zip(reference, candidate, strict=True):
        if a.token_ids == b.token_ids:
            continue
        n = min(len(a.token_ids), len(b.token_ids))
        same = np.asarray(a.token_ids[:n]) == np.asarray(b.token_ids[:n])
        position = n if same.all() else int(np.argmin(same))
        # Where one answer merely goes on, no margin excuses it.
        margin = float(max(a.margins[position], b.margins[position])) if position < n else float("inf")
        near = margin < near_tie
        out.append(Difference(index=a.index, choice=a.choice, position=position, margin=margin, near_tie=near))
    return out


def bit_differences(reference: Sequence[Completion], candidate: Sequence[Completion]) -> list[Difference]:
    """The answers whose tokens or margins are not equal to the last bit, each from its first such token on."""
    out = []
    for a, b in zip(reference, candidate, strict=True):
        n = min(len(a.token_ids), len(b.token_ids))
        tokens = np.asarray(a.token_ids[:n]) == np.asarray(b.token_ids[:n])
        bits = a.margins[:n].view(np.uint32) == b.margins[:n].view(np.uint32)
        same = tokens & bits
        if same.all() and len(a.token_ids) == len(b.token_ids):
            continue
        position = n if same.all() else int(np.argmin(same))
        margin = float(max(a.margins[position], b.margins[position])) if position < n else float("inf")
        out.append(Difference(index=a.index, position=position, margin=margin, near_tie=False))
    return out
