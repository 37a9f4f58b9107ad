"""One context and batch size of `bench.throughput`: every method over the same prompts, and the figures of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aspire_jax.comparing import NEAR_TIE, Arrival, Run, comparison, follow, in_turns
from aspire_jax.costs import Fit
from aspire_jax.engine import Engine
from aspire_jax.host import Stream
from aspire_jax.loading import Model
from aspire_jax.request import Prepared
from bench import machine, novelty, spread, workloads

REFERENCE = "autoregressive"
# Tokens of the run before the first timed one: it finds memory for the programs' buffers.
_WARM = 4
# Called with the figures so far and the seeds that they rest on.
Keep = Callable[[dict[str, Any], int], None]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One context and batch size.

    Attributes:
      mode: "replayed", or "continuous" with more prompts than slots.
      prompts: of each seed.
    """

    model: Model
    context: workloads.Length
    batch: int
    mode: str
    prompts: list[list[Prepared]]


def replayed(
    cell: Cell, engines: Mapping[str, Engine], rounds: int, fit: Fit | None, keep: Keep
) -> tuple[dict[str, Any], Fit]:
    """Every method decodes the same batch from one prefill, seed by seed."""
    rates = [machine.rates(3)]
    runs: dict[str, list[list[Run]]] = {name: [] for name in engines}
    prefill = []
    for seed, requests in enumerate(cell.prompts):
        turns = _turned(engines, seed)
        warm, cache, fit = in_turns(cell.model, [_shorter(r, _WARM) for r in requests], turns, fit=fit)
        first = next(iter(warm.values()))[0].report
        prefill.append(first.prefilled / first.prefill_seconds)
        done, cache, fit = in_turns(cell.model, requests, turns, rounds=rounds, cache=cache, fit=fit)
        del cache
        for name in engines:
            runs[name].append(done[name])
        keep(_cell(cell, runs, prefill, rates), seed + 1)
    rates.append(machine.rates(3))
    assert fit is not None
    return _cell(cell, runs, prefill, rates), fit


def continuous(cell: Cell, engines: Mapping[str, Engine], fit: Fit | None, keep: Keep) -> tuple[dict[str, Any], Fit]:
    """Every method decodes three batches through the slots of one; lengths of answers are drawn, so slots free up."""
    rates = [machine.rates(3)]
    runs: dict[str, list[list[Run]]] = {name: [] for name in engines}
    prefill = []
    for seed, prompts in enumerate(cell.prompts):
        rng = np.random.default_rng(seed)
        requests = [_shorter(r, int(rng.integers(r.max_new // 2, r.max_new + 1))) for r in prompts]
        for name, engine in _turned(engines, seed).items():
            Stream(cell.model, [_shorter(r, _WARM) for r in requests[:1]], engine, fit=fit).collect()
            stream = Stream(cell.model, requests, engine, fit=fit)
            runs[name].append([follow(stream)])
            fit = stream.fit
            prefill.append(stream.report.prefilled / stream.report.prefill_seconds)
        keep(_cell(cell, runs, prefill, rates), seed + 1)
    rates.append(machine.rates(3))
    assert fit is not None
    return _cell(cell, runs, prefill, rates), fit


def _turned(engines: Mapping[str, Engine], seed: int) -> dict[str, Engine]:
    names = list(engines)
    return {name: engines[name] for name in names[seed % len(names) :] + names[: seed % len(names)]}


def _shorter(request: Prepared, most: int) -> Prepared:
    return dataclasses.replace(request, max_new=max(1, min(request.max_new, most)))


def _cell(
    cell: Cell, runs: Mapping[str, list[list[Run]]], prefill: list[float], rates: list[dict[str, float]]
) -> dict[str, Any]:
    """The figures of a context and batch size.

    Args:
      runs: of each method by seed, then round.
    """
    bandwidth = 1e9 * statistics.fmean(r["read_gb_s"] for r in rates)
    plain = [_rate(rounds) for rounds in runs[REFERENCE]]
    lengths = [a.prompt_tokens for rounds in runs[REFERENCE] for a in rounds[0].answers]
    return {
        "context": workloads.name(cell.context),
        "batch": cell.batch,
        "mode": cell.mode,
        "prompt_tokens": [min(lengths), max(lengths)],
        "rates": rates,
        "prefill_tokens_per_second": spread.interval(prefill),
        "methods": {
            name: _figures(cell.model, runs[REFERENCE], seeds, plain, bandwidth) for name, seeds in runs.items()
        },
    }


def _rate(rounds: Sequence[Run]) -> float:
    return statistics.median(run.report.tokens_per_second for run in rounds)


def _figures(
    model: Model, reference: list[list[Run]], seeds: list[list[Run]], plain: list[float], bandwidth: float
) -> dict[str, Any]:
    """One method's: its runs by seed and round."""
    speeds = [_rate(rounds) for rounds in seeds]
    runs = [run for rounds in seeds for run in rounds]
    tokens, seconds = (sum(getattr(r.report, key) for r in runs) for key in ("completion_tokens", "decode_seconds"))
    read = sum(machine.bytes_read(model, r.report.work) for r in runs)
    found = [comparison(a, b, NEAR_TIE[model.dtype]) for a, b in zip(reference, seeds, strict=True)]
    differences = [d for each in found for d in each.differences]
    return {
        "tokens_per_second": spread.interval(speeds),
        "speedup": spread.interval([b / a for a, b in zip(plain, speeds, strict=True)]),
        "tokens_per_verification": _per_seed(seeds, lambda r: r.report.mean_accepted_length),
        "acceptance": _acceptance(seeds, only_novel=False),
        "acceptance_novel": _acceptance(seeds, only_novel=True),
        "drafted_per_token": sum(r.report.drafted for r in runs) / tokens,
        "time_per_output_token_ms": time_per_output_token([a for r in runs for a in r.arrivals]),
        "bytes_per_token": read / tokens,
        "bandwidth_share": read / seconds / bandwidth,
        "answers": sum(len(each.reference) for each in found),
        "exact": sum(each.exact for each in found),
        "near_ties": sum(d.near_tie for d in differences),
        "defects": sum(not d.near_tie for d in differences),
    }


def _per_seed(seeds: list[list[Run]], figure: Callable[[Run], float]) -> dict[str, Any]:
    return spread.interval([statistics.median(figure(run) for run in rounds) for rounds in seeds])


def _acceptance(seeds: list[list[Run]], *, only_novel: bool) -> dict[str, Any] | None:
    """Accepted / verified drafts by seed, and tokens per verification with drafts; None where nothing was drafted."""
    counts = [novelty.counted([a for run in rounds for a in run.answers], only_novel=only_novel) for rounds in seeds]
    rates = [c.accepted / c.drafted for c in counts if c.drafted]
    if not rates:
        return None
    total = novelty.Drafts(*(sum(values) for values in zip(*counts, strict=True)))
    return {
        **spread.interval(rates),
        "drafted": total.drafted,
        "tokens_per_verification": total.emitted / total.verifications,
    }


def time_per_output_token(arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Milliseconds: median, 95th and 99th percentile over tokens.

    The host sees tokens after every run of steps: a run's time is spread evenly over the tokens that a request got in
    it. From a request's second run on, waiting between runs counts.
    """
    seen: set[int] = set()
    values, weights = [], []
    for a in arrivals:
        values.append(1e3 * (a.waiting if a.index in seen else a.decoding) / a.tokens)
        weights.append(a.tokens)
        seen.add(a.index)
    return spread.percentiles(values, weights)
