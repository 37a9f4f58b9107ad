"""Acceptance traces on prompts of one length: what schedulers are replayed and chosen on.

    python -m bench.record_traces --data FILE ... --length 7000 --out trace.npz [--policy NAME=VALUE ...]

Chooses prompts as the other benchmarks do, by --seed, and records as `aspire trace` does (docs/traces.md). Stop tokens
are ignored, so that every answer has --positions places to draft from; further tokens are decoded, so that all
of those have room for all drafts.
"""

from __future__ import annotations

import argparse
import sys

from aspire_jax import load, tracing
from aspire_jax.cli import progress
from aspire_jax.cli.setup import policy_options, positive, write_json
from aspire_jax.methods import METHODS
from bench import workloads


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.record_traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="a converted folder or an alias")
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE", help="benchmark files; Python's text without")
    parser.add_argument("--length", type=workloads.length, default=7000, help="tokens of a prompt, or a bucket")
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--seed", type=int, default=1, help="chooses the prompts")
    parser.add_argument("--positions", type=positive, default=96, help="places of each answer to draft from")
    parser.add_argument("--cadence", choices=("accepted", "every"), default="every")
    parser.add_argument("--d-max", type=positive, default=16)
    parser.add_argument("--method", default="aspire", choices=sorted(METHODS), help="whose context policy")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME=VALUE", help="an option of the method")
    parser.add_argument("--out", required=True, metavar="FILE", help="the trace (npz)")
    parser.add_argument("--json", metavar="FILE", help="write its figures; - for standard output alone")
    args = parser.parse_args()
    try:
        options = policy_options(args.method, args.policy)
        model = load(args.model)
        tokens = args.positions + args.d_max + 1  # no draft begins before the first token
        requests = workloads.choose(model, args.data, args.prompts, args.length, tokens, args.seed)
        with progress.Reporter(quiet=args.json == "-") as tell:
            trace = tracing.record_prepared(
                model,
                requests,
                method=args.method,
                options=options,
                cadence=args.cadence,
                d_max=args.d_max,
                slots=args.prompts,
                progress=tell,
            )
        trace.save(args.out)
        if args.json:
            write_json(args.json, {"out": args.out, **trace.meta, **trace.summary()})
    except (ValueError, OSError) as error:
        parser.exit(2, f"record_traces: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
