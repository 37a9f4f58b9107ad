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
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from aspire_jax import load
from aspire_jax.cli import allocator
from aspire_jax.cli.setup import policy_options, positive, use_compile_cache
from aspire_jax.engine import Engine
from aspire_jax.errors import InputError
from aspire_jax.methods import METHODS
from aspire_jax.sizing import engine_for
from bench import command, machine, throughput_report, workloads
from bench.throughput_cell import REFERENCE, Cell, continuous, replayed

ORACLE = "oracle"
# Prompts for each slot of a continuous batch.
_REFILLS = 3


def main() -> int:
    allocator.settle()
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
        done = f"{workloads.name(cell.context)} x {cell.batch}, {cell.mode}: {{}} of {len(cell.prompts)} seeds"

        def keep(rows: dict[str, Any], seeds: int, done: str = done) -> None:
            say.keep({**results, "cells": [*results["cells"], rows]})
            say(done.format(seeds))

        if cell.mode == "replayed":
            rows, fit = replayed(cell, engines, args.rounds, fit, keep)
        else:
            rows, fit = continuous(cell, engines, fit, keep)
        results["cells"].append(rows)
        say.keep(results)
        say(throughput_report.cell_text(rows))
    for name, why in results["left_out"].items():
        say(f"left out: {name}: {why}")
    if args.table:
        throughput_report.write_table(results, args.table)
    return results


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


if __name__ == "__main__":
    sys.exit(main())
