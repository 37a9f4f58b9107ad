"""Is a method's output AutoRegressive's? Every difference on real prompts, with its margin.

    python -m bench.exactness --data FILE ... [--json FILE]

Both methods decode the same prefilled prompts. A difference is a near tie where neither method saw the two best logits
further apart than rounding explains (`comparing.NEAR_TIE`); any other is a defect, and the exit code 1. `aspire-fixed`
drafts whether it pays or not, which tests more than a scheduler that decodes plainly where drafting cannot pay.

With --reproducible every difference is a defect, also one in the last bit of a margin. There the method prefills for
itself and decodes in half as many slots, in reverse order, so that slots, neighbours and refills differ too.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from typing import Any

from aspire_jax import load
from aspire_jax.cli.setup import policy_options, positive, write_json
from aspire_jax.comparing import Comparison, bit_differences, compare, follow
from aspire_jax.errors import InputError
from aspire_jax.loading import Model
from aspire_jax.methods import METHODS
from aspire_jax.request import Prepared, prepare
from aspire_jax.serving import Stream
from aspire_jax.sizing import engine_for
from bench import machine, workloads


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a converted folder or an alias")
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE", help="prompts (JSONL: id, prompt)")
    parser.add_argument("--longest", type=positive, default=8000, help="leave out prompts of more tokens")
    parser.add_argument("--shortest", type=positive, default=1, help="and of fewer")
    parser.add_argument("--limit", type=positive, help="prompts at most, spread over all lengths; all where not given")
    parser.add_argument("--max-tokens", type=positive, default=64)
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--method", default="aspire", choices=sorted(METHODS), help="default: aspire")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME=VALUE", help="an option of the method")
    parser.add_argument("--reproducible", action="store_true", help="expect the same bits, in other slots")
    parser.add_argument("--json", metavar="FILE", help="write the results; - for standard output alone")
    args = parser.parse_args()
    try:
        results = measure(args)
    except (ValueError, OSError) as error:
        parser.exit(2, f"exactness: error: {error}\n")
    if args.json:
        write_json(args.json, results)
    return 1 if results["defects"] else 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Compares all prompts, longest batch last."""
    loaded = load(args.model)
    options = policy_options(args.method, args.policy)
    chosen = _choose(loaded, args)
    totals = {"prompts": 0, "equal": 0, "near_ties": 0, "defects": 0, "tokens": 0, "drafted": 0, "accepted": 0}
    differences: list[dict[str, Any]] = []
    for start in range(0, len(chosen), args.batch):
        group = chosen[start : start + args.batch]
        if args.reproducible:
            found = _to_the_bit(loaded, group, args.method, options)
        else:
            found = compare(loaded, group, candidate=args.method, options=options, rounds=1)
        report = found.candidate_reports[0]
        totals["prompts"] += len(group)
        totals["equal"] += found.exact
        totals["defects"] += len(found.defects)
        totals["near_ties"] += len(found.differences) - len(found.defects)
        totals["tokens"] += report.completion_tokens
        totals["drafted"] += report.drafted
        totals["accepted"] += report.accepted
        for d in found.differences:
            request = next(r for r in group if r.index == d.index)
            differences.append(
                {
                    "id": request.id,
                    "position": d.position,
                    "margin": d.margin if math.isfinite(d.margin) else None,
                    "near_tie": d.near_tie,
                }
            )
        if args.json != "-":
            lengths = [len(r.tokens) for r in group]
            print(f"{min(lengths)} to {max(lengths)} tokens: {found.exact}/{len(group)} equal", flush=True)
    if args.json != "-":
        for row in differences:
            what = "near tie" if row["near_tie"] else "DEFECT"
            print(f"{row['id']}: differs from token {row['position']} on, {what}, margin {row['margin']}")
        print(
            f"{totals['equal']}/{totals['prompts']} equal, {totals['near_ties']} near ties, "
            f"{totals['defects']} defects; {totals['tokens']} tokens, "
            f"{totals['accepted']} of {totals['drafted']} drafts accepted"
        )
    command = " ".join(["python -m bench.exactness", *sys.argv[1:]])
    return {
        "command": command,
        "model": loaded.name,
        "machine": machine.describe(),
        **totals,
        "differences": differences,
    }


def _to_the_bit(loaded: Model, group: list[Prepared], method: str, options: dict[str, Any]) -> Comparison:
    """Plain decoding of all prompts at a time against `method`, half as many at a time and the last prompt first."""
    n = len(group)
    plain = engine_for(loaded, group, method="autoregressive", slots=n, reproducible=True)
    other = engine_for(loaded, group, method=method, slots=(n + 1) // 2, options=options, reproducible=True)
    runs = follow(Stream(loaded, group, plain)), follow(Stream(loaded, group[::-1], other))
    return Comparison(
        reference=runs[0].answers,
        candidate=runs[1].answers,
        reference_reports=[runs[0].report],
        candidate_reports=[runs[1].report],
        differences=bit_differences(runs[0].answers, runs[1].answers),
    )


def _choose(loaded: Model, args: argparse.Namespace) -> list[Prepared]:
    """The prompts within the bounds, shortest first, so that a batch's lengths are alike."""
    ready = prepare(loaded, workloads.read(args.data), max_tokens=1, truncate=True)
    room = min(args.longest, loaded.config.max_length - args.max_tokens)
    fitting = sorted((r for r in ready if args.shortest <= len(r.tokens) <= room), key=lambda r: len(r.tokens))
    if not fitting:
        raise InputError(f"data: no prompt of {args.shortest} to {room} tokens, expected at least one")
    if args.limit and len(fitting) > args.limit:
        fitting = [fitting[i * len(fitting) // args.limit] for i in range(args.limit)]
    return [dataclasses.replace(r, max_new=args.max_tokens) for r in fitting]


if __name__ == "__main__":
    sys.exit(main())
