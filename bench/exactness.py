"""Is a method's output AutoRegressive's? Every difference on real prompts, with its margin, and the task scores of all.

    python -m bench.exactness [--data FILE ...] [--method NAME ...] [--json FILE] [--plot FILE] [--quick]

All methods decode the same prefilled prompts. A difference is a near tie where neither method saw the two best logits
further apart than rounding explains (`comparing.NEAR_TIE`); any other is a defect, and the exit code 1. `aspire-fixed`
drafts whether it pays or not, which tests more than `aspire`, which decodes plainly where drafting cannot pay.
With --temperature and --seed tokens are drawn, the same ones by every method; a margin is then the least change of
logits that would draw another token.

With --reproducible every difference is a defect, also one in the last bit of a margin. There a method prefills for
itself and decodes in half as many slots, in reverse order, so that slots, neighbours and refills differ too.

Answers to tasks that have a metric (`bench/scoring.py`) are scored, AutoRegressive's beside the methods'. They end at
--max-tokens, so a score says whether the methods agree; for the model's own quality allow longer answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from aspire_jax import load
from aspire_jax.cli import demo_prompts, sampling_options
from aspire_jax.cli.setup import policy_options, positive, use_compile_cache
from aspire_jax.comparing import NEAR_TIE, Comparison, Run, bit_differences, comparison, follow, in_turns
from aspire_jax.costs import Fit
from aspire_jax.errors import InputError
from aspire_jax.host import Stream
from aspire_jax.loading import Model
from aspire_jax.methods import METHODS
from aspire_jax.request import Prepared, Request, prepare
from aspire_jax.results import Completion
from aspire_jax.sampling.params import fresh_seed
from aspire_jax.sizing import engine_for
from bench import command, datasets, machine, plots, scoring
from bench.datasets import Item

REFERENCE = "autoregressive"
# Tokens of a prompt of text that Python carries, where no data is given.
_TEXT = 1500


def main() -> int:
    return command.run(parser(), measure, draw, passed=lambda results: results["defects"] == 0)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command.parser(
        "exactness", __doc__, quick="4 prompts of at most 2,500 tokens, 16 new", plot="equal answers and task scores"
    )
    made.add_argument("--model", default="smollm2-135m", help="a converted folder or an alias")
    made.add_argument("--data", nargs="+", default=[], metavar="FILE", help="prompts (see bench/datasets.py)")
    made.add_argument("--longest", type=positive, default=8000, help="leave out prompts of more tokens")
    made.add_argument("--shortest", type=positive, default=1, help="and of fewer")
    made.add_argument("--limit", type=positive, help="prompts at most, spread over all lengths; all where not given")
    made.add_argument("--max-tokens", type=positive, default=64)
    made.add_argument("--batch", type=positive, default=8)
    made.add_argument(
        "--method", nargs="+", default=["aspire", "aspire-fixed"], choices=sorted(METHODS), metavar="NAME",
        help="default: aspire aspire-fixed",
    )  # fmt: skip
    made.add_argument(
        "--policy", action="append", default=[], metavar="NAME=VALUE", help="an option of every method given"
    )
    made.add_argument("--reproducible", action="store_true", help="expect the same bits, in other slots")
    sampling_options.add(made)
    return made


def measure(args: argparse.Namespace, say: command.Say) -> dict[str, Any]:
    """Compares all prompts, longest batch last."""
    if args.quick:
        args.longest, args.limit, args.max_tokens = min(args.longest, 2500), min(args.limit or 4, 4), 16
    methods = [m for m in dict.fromkeys(args.method) if m != REFERENCE]
    options = {m: policy_options(m, args.policy) for m in methods}
    use_compile_cache()
    loaded = load(args.model)
    items = {item.id: item for item in datasets.read(args.data)}
    chosen = _choose(loaded, [item.request() for item in items.values()], args)
    answers: dict[str, list[Completion]] = {name: [] for name in (REFERENCE, *methods)}
    found: dict[str, list[Comparison]] = {name: [] for name in methods}
    fit: Fit | None = None
    for start in range(0, len(chosen), args.batch):
        group = chosen[start : start + args.batch]
        if args.reproducible:
            runs = _in_other_slots(loaded, group, options)
        else:
            runs, fit = _together(loaded, group, _as_long(group, chosen), options, fit)
        lengths = [len(r.tokens) for r in group]
        for name, run in runs.items():
            answers[name] += run.answers
        for name in methods:
            each = comparison([runs[REFERENCE]], [runs[name]], NEAR_TIE[loaded.dtype])
            if args.reproducible:
                bits = bit_differences(runs[REFERENCE].answers, runs[name].answers)
                each = dataclasses.replace(each, differences=bits)
            found[name].append(each)
            equal = found[name][-1].exact
            say(f"{min(lengths)} to {max(lengths)} tokens: {name}: {equal}/{len(group)} equal")
        say.keep({"methods": {name: _totals(found[name]) for name in methods}})
    rows = {name: _totals(found[name]) for name in methods}
    scores = task_scores(items, answers)
    for name, row in rows.items():
        _tell(name, row, say)
    for task, score in scores.items():
        values = ", ".join(f"{name} {value:.3f}" for name, value in score["scores"].items())
        say(f"{task} ({score['metric']}, {score['answers']} answers): {values}")
    return {
        "model": loaded.name,
        "dtype": loaded.dtype,
        "machine": machine.describe(),
        "options": options,
        "max_tokens": args.max_tokens,
        "sampling": sampling_options.given(args),
        "reproducible": args.reproducible,
        "defects": sum(row["defects"] for row in rows.values()),
        "methods": rows,
        "scores": scores,
    }


def _as_long(group: list[Prepared], chosen: list[Prepared]) -> list[Prepared]:
    """All prompts up to the power of two above the group's longest: groups that share an engine compile once."""
    most = 1 << (max(len(r.tokens) for r in group) - 1).bit_length()
    return [r for r in chosen if len(r.tokens) <= most]


def _together(
    loaded: Model, group: list[Prepared], sized_for: list[Prepared], options: Mapping[str, Any], fit: Fit | None
) -> tuple[dict[str, Run], Fit]:
    """Plain decoding and every method, from one prefill."""
    engines = {
        name: engine_for(loaded, sized_for, method=name, slots=len(group), options=options.get(name))
        for name in (REFERENCE, *options)
    }
    runs, _, fit = in_turns(loaded, group, engines, fit=fit)
    return {name: run for name, (run,) in runs.items()}, fit


def _in_other_slots(loaded: Model, group: list[Prepared], options: Mapping[str, Any]) -> dict[str, Run]:
    """Plain decoding of all prompts at a time; every method half as many at a time and the last prompt first."""
    n = len(group)
    plain = engine_for(loaded, group, method=REFERENCE, slots=n, reproducible=True)
    runs = {REFERENCE: follow(Stream(loaded, group, plain))}
    for name, given in options.items():
        engine = engine_for(loaded, group, method=name, slots=(n + 1) // 2, options=given, reproducible=True)
        runs[name] = follow(Stream(loaded, group[::-1], engine))
    return runs


def _totals(found: Sequence[Comparison]) -> dict[str, Any]:
    """One method's counts and differences over all batches."""
    reports = [each.candidate_reports[0] for each in found]
    return {
        "prompts": sum(len(each.reference) for each in found),
        "equal": sum(each.exact for each in found),
        "near_ties": sum(len(each.differences) - len(each.defects) for each in found),
        "defects": sum(len(each.defects) for each in found),
        "tokens": sum(r.completion_tokens for r in reports),
        "drafted": sum(r.drafted for r in reports),
        "accepted": sum(r.accepted for r in reports),
        "differences": [
            {
                "id": next(a.id for a in each.reference if a.index == d.index),
                "position": d.position,
                "margin": d.margin if math.isfinite(d.margin) else None,
                "near_tie": d.near_tie,
            }
            for each in found
            for d in each.differences
        ],
    }


def _tell(name: str, row: Mapping[str, Any], say: command.Say) -> None:
    for d in row["differences"]:
        what = "near tie" if d["near_tie"] else "DEFECT"
        say(f"{name}: {d['id']}: differs from token {d['position']} on, {what}, margin {d['margin']}")
    say(
        f"{name}: {row['equal']}/{row['prompts']} equal, {row['near_ties']} near ties, {row['defects']} defects; "
        f"{row['tokens']} tokens, {row['accepted']} of {row['drafted']} drafts accepted"
    )


def task_scores(items: Mapping[str | int, Item], answers: Mapping[str, Sequence[Completion]]) -> dict[str, Any]:
    """Mean score of each method by task; none where the metrics' library is not installed."""
    if importlib.util.find_spec("rapidfuzz") is None:
        return {}
    out: dict[str, Any] = {}
    for name, given in answers.items():
        scored: dict[str, list[float]] = {}
        for answer in given:
            item = items.get(answer.id)
            value = None if item is None else scoring.score(item, answer.text)
            if item is not None and value is not None:
                scored.setdefault(item.dataset, []).append(value)
        for task, values in scored.items():
            row = out.setdefault(task, {"metric": scoring.METRICS[task], "answers": len(values), "scores": {}})
            row["scores"][name] = statistics.fmean(values)
    return dict(sorted(out.items()))


def _choose(loaded: Model, requests: list[Request], args: argparse.Namespace) -> list[Prepared]:
    """The prompts within the bounds, shortest first, so that a batch's lengths are alike; Python's own without data."""
    if not requests:
        if loaded.tokenizer is None:
            raise InputError(f"model {loaded.name}: no tokenizer, expected a folder converted with its tokenizer")
        requests = demo_prompts.requests(loaded.tokenizer, min(args.longest, _TEXT), args.batch)
    if args.temperature and args.seed is None:
        args.seed = fresh_seed()
    sampling = sampling_options.given(args)
    ready = prepare(loaded, requests, max_tokens=1, truncate=True, sampling=sampling)
    room = min(args.longest, loaded.config.max_length - args.max_tokens)
    fitting = sorted((r for r in ready if args.shortest <= len(r.tokens) <= room), key=lambda r: len(r.tokens))
    if not fitting:
        raise InputError(f"data: no prompt of {args.shortest} to {room} tokens, expected at least one")
    if args.limit and len(fitting) > args.limit:
        fitting = [fitting[i * len(fitting) // args.limit] for i in range(args.limit)]
    return [dataclasses.replace(r, max_new=args.max_tokens) for r in fitting]


def draw(results: dict[str, Any], file: str) -> None:
    """How many answers are equal, and each task's score by method."""
    rows, scores = results["methods"], results["scores"]
    title = f"The same answers as AutoRegressive's: {results['model']}, {results['max_tokens']} tokens an answer"
    made, axes = plots.figure(title, 2 if scores else 1, width=max(5.0, 1 + 0.9 * len(scores)))
    kinds = {"equal": "equal", "near tie": "near_ties", "defect": "defects"}
    counts = {kind: [row[key] for row in rows.values()] for kind, key in kinds.items()}
    plots.bars(axes[0], list(rows), counts, label="answers", text="{:.0f}")
    plots.legend_in(axes[0])
    if scores:
        names = list(next(iter(scores.values()))["scores"])
        series = {name: [s["scores"].get(name) for s in scores.values()] for name in names}
        groups = [f"{task}\n{s['metric']}, {s['answers']}" for task, s in scores.items()]
        plots.bars(axes[1], groups, series, label="mean score")
        plots.legend(axes[1])
    plots.note(made, plots.where(results))
    plots.save(made, file)


if __name__ == "__main__":
    sys.exit(main())
