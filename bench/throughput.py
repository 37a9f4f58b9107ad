"""Every method on the same prompts: decode speed against AutoRegressive, acceptance, tokens per verification.

    python -m bench.throughput [--data FILE ...] [--json FILE] [--table FILE] [--plot FILE] [--quick]

Methods x contexts x batch sizes x seeds. A seed chooses the prompts; they are prefilled once and every method decodes
from that cache, in turns whose order changes with the seed, so that a drifting machine drifts for all alike. Compiling
and the first run of every program lie outside the times. Figures are means over seeds with 95 % intervals (Student's
t); speedups are taken within a seed.

--continuous N decodes three batches' worth of prompts through the slots of one, N seeds at each context: slots that
finish are refilled, each method prefills for itself, and answers differ in length. Time per output token then includes
the waiting for other rows' prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aspire_jax import load
from aspire_jax.cli.setup import policy_options, positive, use_compile_cache
from aspire_jax.comparing import NEAR_TIE, Arrival, Run, comparison, follow, in_turns
from aspire_jax.costs import Fit
from aspire_jax.engine import Engine
from aspire_jax.errors import InputError
from aspire_jax.loading import Model
from aspire_jax.methods import METHODS
from aspire_jax.request import Prepared
from aspire_jax.serving import Stream
from aspire_jax.sizing import engine_for
from bench import command, machine, novelty, spread, throughput_report, workloads

REFERENCE, ORACLE = "autoregressive", "oracle"
# Tokens of the run before the first timed one: it finds memory for the programs' buffers.
_WARM = 4
# Prompts for each slot of a continuous batch.
_REFILLS = 3


def main() -> int:
    return command.run(parser(), measure, throughput_report.draw)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    quick = "three methods, 4 prompts of 1,000 tokens, 2 seeds, 32 tokens"
    picture = "speedup, tokens per verification and acceptance of every method"
    made = command.parser("throughput", __doc__, quick=quick, plot=picture)
    made.add_argument("--model", default="smollm2-135m", help="a converted folder or an alias")
    made.add_argument("--data", nargs="+", default=[], metavar="FILE", help="prompts (see bench/datasets.py)")
    made.add_argument("--methods", nargs="+", metavar="NAME", help=f"default: all of {', '.join(METHODS)}")
    made.add_argument(
        "--contexts", nargs="+", type=workloads.length, metavar="N", help="tokens, or buckets like 16k-18k"
    )
    made.add_argument("--batches", nargs="+", type=positive, metavar="B", help="prompts at a time (default: 8)")
    made.add_argument("--seeds", type=positive, help="how many (default: 5)")
    made.add_argument("--max-tokens", type=positive, help="tokens of each answer (default: 128)")
    made.add_argument("--rounds", type=positive, default=1, help="how often each method decodes a seed's prompts")
    made.add_argument("--continuous", type=int, default=0, metavar="N", help="seeds of continuous batches")
    made.add_argument(
        "--policy", action="append", default=[], metavar="METHOD:NAME=VALUE", help="an option of a method"
    )
    made.add_argument("--table", metavar="FILE", help="also write the results as Markdown")
    return made


def measure(args: argparse.Namespace, say: command.Say) -> dict[str, Any]:
    """All cells, one after the other."""
    quick = args.quick
    methods = args.methods or [m for m in METHODS if not quick or m in (REFERENCE, "aspire-fixed", "aspire")]
    contexts = args.contexts or ([1000] if quick else [2000, 4000, 7000])
    batches = args.batches or [4 if quick else 8]
    seeds, args.max_tokens = args.seeds or (2 if quick else 5), args.max_tokens or (32 if quick else 128)
    options = options_of(methods, args.policy)
    use_compile_cache()
    loaded = load(args.model)
    results: dict[str, Any] = {
        "command": args.command,
        "model": loaded.name,
        "dtype": loaded.dtype,
        "machine": machine.describe(),
        "seeds": seeds,
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "data": args.data,
        "options": options,
        "left_out": {},
        "cells": [],
    }
    planned = []  # all prompts and engines, so that what is wrong with them shows before anything is measured
    for context, batch in itertools.product(contexts, batches):
        for mode, count, batches_each in (("replayed", seeds, 1), ("continuous", args.continuous, _REFILLS)):
            prompts = [
                workloads.choose(loaded, args.data, batch * batches_each, context, args.max_tokens, seed)
                for seed in range(count)
            ]
            if prompts:
                cell = Cell(loaded, context, batch, mode, prompts)
                required = args.methods is not None
                engines = engines_of(cell, methods, options, results["left_out"], required=required)
                if mode == "continuous" and ORACLE in engines:
                    del engines[ORACLE]
                    results["left_out"][f"{ORACLE}, continuous"] = "its first pass needs a slot for every prompt"
                planned.append((cell, engines))
    fit = None
    for cell, engines in planned:
        rows, fit = (
            replayed(cell, engines, args.rounds, fit) if cell.mode == "replayed" else continuous(cell, engines, fit)
        )
        results["cells"].append(rows)
        say.keep(results)
        say(throughput_report.cell_text(rows))
    for name, why in results["left_out"].items():
        say(f"left out: {name}: {why}")
    if args.table:
        throughput_report.write_table(results, args.table)
    return results


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


def options_of(methods: Sequence[str], given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The options METHOD:NAME=VALUE by method.

    Raises:
      InputError: no such method or option.
    """
    if REFERENCE not in methods:
        raise InputError(f"--methods: {' '.join(methods)}, expected {REFERENCE} among them")
    split = [text.partition(":") for text in given]
    for text, (name, colon, _) in zip(given, split, strict=True):
        if not colon or name not in methods:
            raise InputError(f"--policy: {text!r}, expected METHOD:NAME=VALUE with one of the methods measured")
    return {m: policy_options(m, [rest for name, _, rest in split if name == m]) for m in methods}


def engines_of(
    cell: Cell, methods: Sequence[str], options: Mapping[str, Any], left_out: dict[str, str], *, required: bool
) -> dict[str, Engine]:
    """One engine a method for all seeds, so that nothing compiles twice.

    Methods that cannot be configured without being told more are left out and noted, unless they were asked for.
    """
    every = [r for prompts in cell.prompts for r in prompts]
    engines = {}
    for name in methods:
        try:
            engines[name] = engine_for(cell.model, every, method=name, slots=cell.batch, options=options[name])
        except ValueError as error:
            if required:
                raise InputError(f"method {name}: {error}") from error
            left_out[name] = str(error)
    return engines


def replayed(cell: Cell, engines: Mapping[str, Engine], rounds: int, fit: Fit | None) -> tuple[dict[str, Any], Fit]:
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
    rates.append(machine.rates(3))
    assert fit is not None
    return _cell(cell, runs, prefill, rates), fit


def continuous(cell: Cell, engines: Mapping[str, Engine], fit: Fit | None) -> tuple[dict[str, Any], Fit]:
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


if __name__ == "__main__":
    sys.exit(main())
