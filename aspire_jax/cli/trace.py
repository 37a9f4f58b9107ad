"""aspire trace: records what every draft would have been worth, for schedulers to be replayed on and for the oracle."""

from __future__ import annotations

import argparse
from pathlib import Path

from aspire_jax.cli import progress, requests_file, setup
from aspire_jax.errors import InputError, written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--model", "-m", required=True, metavar="M", help="converted folder, or smollm2-135m")
    parser.add_argument("--input", "-i", required=True, metavar="FILE", help="prompts, as for aspire generate")
    parser.add_argument("--out", "-o", type=written, required=True, metavar="FILE", help="the trace (npz)")
    parser.add_argument("--cadence", choices=("accepted", "every"), default="accepted", help=_CADENCE)
    parser.add_argument("--d-max", type=setup.positive, default=16, metavar="D", help="drafts at a time (default: 16)")
    parser.add_argument("--method", default="aspire", help="whose context policy the drafts read by; default: aspire")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME=VALUE", help="an option of the method")
    parser.add_argument("--max-tokens", type=setup.positive, default=128, metavar="N", help="default: 128")
    parser.add_argument("--slots", type=setup.positive, default=8, metavar="B", help="prompts at a time (default: 8)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    parser.add_argument("--max-length", type=setup.positive, metavar="S", help="prompt and answer, below the model's")
    parser.add_argument("--dtype", choices=setup.DTYPES, help="default: the model's")
    parser.add_argument("--truncate", action="store_true", help="cut the middle out of prompts that are too long")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
    setup.add_json(parser, "the trace's figures")


_CADENCE = "go on behind the accepted drafts (what the oracle replays), or draft behind every token; default: accepted"


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    _check(args)
    from aspire_jax import tracing
    from aspire_jax.request import prepare

    requests, places, _ = requests_file.read(args.input)
    options = setup.policy_options(args.method, args.policy)
    model = setup.load_model(args.model, dtype=args.dtype, quiet=args.quiet)
    limits = {name: getattr(args, name) for name in ("max_tokens", "stop", "truncate", "max_length")}
    prepared = prepare(model, requests, places=places, call="--", **limits)
    with progress.Reporter(quiet=args.quiet) as tell:
        try:
            trace = tracing.record_prepared(
                model, prepared, method=args.method, options=options, cadence=args.cadence, d_max=args.d_max,
                slots=args.slots, progress=tell,
            )  # fmt: skip
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"--method {args.method}: {error}") from error
    trace.save(args.out)
    if args.json:
        setup.write_json(args.json, {"out": args.out, **trace.meta, **trace.summary()})
    if not args.quiet and args.json != "-":
        s = trace.summary()
        print(
            f"{args.out}: {s['requests']} requests, {s['starts']:,} draft starts, of {s['drafted_mean']:.1f} drafts "
            f"{s['accepted_mean']:.2f} accepted in the mean"
        )
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses an output that would destroy something, before anything is imported or read."""
    out = Path(args.out)
    files = {"--input": Path(args.input), "--json": Path(args.json) if args.json not in (None, "-") else None}
    for name, other in files.items():
        if other is not None and other.resolve() == out.resolve():
            raise InputError(f"--out: {out}, expected another file than {name}")
    if out.exists() and not args.overwrite:
        raise InputError(f"--out: {out} exists, expected another name or --overwrite")
