"""The paper's studies on a model at hand, each beside the paper's figure or number.

    python -m bench.studies [--only NAME ...] [--data FILE ...] [--traces FILE ...] [--json FILE] [--plot FILE|FOLDER]

Studies of drafts decode prompts of one length behind one prefill. Studies of schedulers replay traces through the
library's own policies with the paper's step times; the traces are recorded first where none are given (`aspire trace
--cadence every`, `bench.record_traces`). No study times anything: what this machine is doing besides does not matter.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from aspire_jax import tracing
from aspire_jax.cli.setup import positive, use_compile_cache
from aspire_jax.errors import InputError
from bench import command, machine, plots
from bench.studies.runs import Runs, Sizes
from bench.studies.table import STUDIES

# What --quick takes where more is asked for.
QUICK = Sizes(
    prompts=2, context=500, max_tokens=32, requests=2, positions=34, d_max=16, budget=128, steps=500, quick=True
)
_LOOK: dict[str, Any] = {"columns": 2, "width": 6.4, "height": 4.0}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(
        "studies", __doc__, quick="two short prompts, few values", plot="all studies, or one picture each into a folder"
    )
    full = Sizes()
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--model", default="smollm2-135m", help="a converted folder or an alias")
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE", help="prompts; Python's text without")
    parser.add_argument("--traces", nargs="+", default=[], metavar="FILE", help="recorded with cadence every")
    parser.add_argument("--prompts", type=positive, default=full.prompts, help="decoded beside each other")
    parser.add_argument("--context", type=positive, default=full.context, help="tokens of a prompt, about")
    parser.add_argument("--max-tokens", type=positive, default=full.max_tokens, help="decoded behind each prompt")
    parser.add_argument("--requests", type=positive, default=full.requests, help="prompts of a trace")
    parser.add_argument("--positions", type=positive, default=full.positions, help="places a trace drafts from")
    parser.add_argument("--d-max", type=positive, default=full.d_max, help="drafts from each of them")
    parser.add_argument("--budget", type=positive, default=full.budget, help="tokens a draft reads")
    parser.add_argument("--steps", type=positive, default=full.steps, help="steps of each replayed run")
    parser.add_argument("--seed", type=int, default=full.seed, help="chooses the prompts")
    return command.run(parser, measure, draw, arguments, folder=True)


def measure(args: argparse.Namespace, say: command.Say) -> command.Results:
    """The studies asked for."""
    names = list(dict.fromkeys(args.only or STUDIES))
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        raise InputError(f"--only: {' '.join(unknown)}, expected some of {', '.join(STUDIES)}")
    use_compile_cache()
    given = Sizes(**{name: getattr(args, name) for name in Sizes._fields})
    if args.quick:
        # All but the seed and the mark itself are amounts.
        less = {name: min(getattr(given, name), getattr(QUICK, name)) for name in Sizes._fields}
        given = Sizes(**less)._replace(seed=given.seed, quick=True)
    runs = Runs(args.model, args.data, [tracing.load(file) for file in args.traces], given, say)
    results: command.Results = {"machine": machine.describe(), "studies": {}, "seconds": {}}
    for name in names:
        study, began = STUDIES[name], time.monotonic()
        say(f"{name} (paper: {study.paper})")
        found = results["studies"][name] = study.measure(runs)
        results["seconds"][name] = time.monotonic() - began
        say.keep(results)
        for line in study.tell(found):
            say(f"  {line}")
        jax.clear_caches()  # no other study runs the same programs, and each holds memory
    results |= runs.described()
    if "answers_that_differ" in results:
        say(f"answers that a policy changed (near ties, rounding): {results['answers_that_differ']}")
    return results


def draw(results: command.Results, file: str) -> None:
    """Every study into a picture of its own in a folder, or all of them into one."""
    told = plots.where(results)
    if Path(file).is_dir():
        for name, found in results["studies"].items():
            study = STUDIES[name]
            made, axes = plots.figure(study.title, len(study.panels), **_LOOK)
            for each, panel in zip(axes, study.panels, strict=True):
                panel(each, found)
            plots.note(made, told)
            plots.save(made, str(Path(file) / f"{name}.png"))
        return
    panels = [(panel, found) for name, found in results["studies"].items() for panel in STUDIES[name].panels]
    made, axes = plots.figure("The paper's studies", len(panels), **_LOOK)
    for each, (panel, found) in zip(axes, panels, strict=True):
        panel(each, found)
    plots.note(made, told)
    plots.save(made, file)


if __name__ == "__main__":
    sys.exit(main())
