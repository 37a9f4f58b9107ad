"""Which sparse context accepts most? Searches the family of context policies by mean accepted length.

    python -m bench.context_search --data FILE ... [--json FILE] [--markdown FILE]

Every policy drafts 16 tokens at a time behind the same prompts, which are prefilled once; a verification counts where
it held 16 drafts. "Novel" are those where fewer than 34 % of the next 13 tokens' 4-grams stood in the answer before.

The search goes through the settings one by one, keeps the best value of each (by novel mean accepted length on the
search half of the prompts), and then measures that policy and the baselines on the report half, which it has not seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aspire_jax import load
from aspire_jax.cli.setup import positive
from aspire_jax.context import ContextPolicy
from bench import command, context_search_report, machine, workloads
from bench.context_family import DRAFTS, Group, Tuned, baselines, ratio, summary

Evaluate = Callable[[str, ContextPolicy], dict[str, Any]]


def stages(layers: int) -> list[tuple[str, list[Any]]]:
    """The settings in the order of the search, each with the values to try."""
    third, half, two_thirds = layers // 3, layers // 2, 2 * layers // 3
    return [
        ("layers", [(two_thirds,), (layers - 2,), (third, two_thirds), (half,), (third,)]),
        ("own", [0.5, 0.0, 0.25, 0.75, 1.0]),
        ("window", [0.125, 0.0625, 0.25, 0.5]),
        ("heads", ["mean", "kv", "max"]),
        ("renew", ["step", "verification"]),
    ]


def search(
    evaluate: Evaluate, start: Tuned, layers: int, most: int | None = None
) -> tuple[Tuned, list[dict[str, Any]]]:
    """Setting by setting, the value with the highest novel mean accepted length; and all that was tried.

    Args:
      most: values of each setting to try; None for all.
    """
    best, tried = start, []
    for field, values in stages(layers):
        rows = []
        for value in values[:most]:
            policy = dataclasses.replace(best, **{field: value})
            rows.append({"setting": field, "value": value, "policy": policy, **evaluate(f"{field} {value}", policy)})
        best = max(rows, key=lambda row: row["novel"]["mean"])["policy"]
        tried += rows
    return best, tried


def measure(args: argparse.Namespace, say: command.Say) -> command.Results:
    """Searches on one half of the prompts, measures on the other."""
    if args.quick:
        args.prompts, args.context, args.max_tokens, args.budget = 2, 1000, 48, 128
    loaded = load(args.model)
    requests = workloads.near(loaded, args.data, 2 * args.prompts, args.context, args.max_tokens, args.seed)
    halves = {"search": requests[::2], "report": requests[1::2]}
    capacity = -(-(args.context + args.max_tokens) // 64) * 64
    results: dict[str, Any] = {
        "model": loaded.name,
        "dtype": loaded.dtype,
        "machine": machine.describe(),
        "drafts": DRAFTS,
        **{name: getattr(args, name) for name in ("command", "prompts", "budget", "context", "max_tokens", "seed")},
    }
    begun = time.perf_counter()

    def evaluate(group: Group, seen: dict[ContextPolicy, Any], half: str, name: str, policy: Any) -> dict[str, Any]:
        found = seen.get(policy) or summary(group.decode(policy))
        seen[policy] = found
        a, b = found["all"], found["novel"]
        say(
            f"{(time.perf_counter() - begun) / 60:5.1f} min  {half:6}  {name:32} all {a['mean']:5.2f}  "
            f"novel {b['mean']:5.2f} +- {b['standard_error']:.2f} ({b['verifications']})"
        )
        return found

    group = Group(loaded, halves["search"], capacity)
    on_search = functools.partial(evaluate, group, {}, "search")
    name, first = next(iter(baselines(args.budget).items()))
    rows = [{"name": name, "policy": first, **on_search(name, first)}]
    start = Tuned(rho=0.0, least=args.budget, renew="step")
    best, tried = search(on_search, start, loaded.config.n_layers, 2 if args.quick else None)
    results["search"] = {"baselines": rows, "tried": tried, "best": best, "answers_that_differ": group.differing}
    del group, on_search
    group = Group(loaded, halves["report"], capacity)
    on_report = functools.partial(evaluate, group, {}, "report")
    rows = []
    for budget in (args.budget,) if args.quick else (args.budget, args.budget // 2):
        found = {"best blend": dataclasses.replace(best, least=budget), **baselines(budget)}
        if budget != args.budget:  # against the reference alone
            found = dict(list(found.items())[:2])
        rows += [{"name": n, "budget": budget, "policy": p, **on_report(f"{n}, {budget}", p)} for n, p in found.items()]
        blend, reference = rows[-len(found)], rows[1 - len(found)]
        blend["against_reference"] = ratio(blend, reference)
        say(
            "           best blend against refresh layer N-2: {:.2f} ({:.2f} to {:.2f})".format(
                *blend["against_reference"]
            )
        )
    results["report"] = {"rows": rows, "answers_that_differ": group.differing}
    results["minutes"] = (time.perf_counter() - begun) / 60
    results = context_search_report.plain(results)
    if args.markdown:
        Path(args.markdown).write_text(context_search_report.markdown(results), encoding="utf-8")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(
        "context_search", __doc__, quick="few short prompts, two values of each setting", plot="accepted lengths"
    )
    parser.add_argument("--model", default="smollm2-135m", help="a converted folder or an alias")
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE", help="prompts (see bench/datasets.py)")
    parser.add_argument("--prompts", type=positive, default=8, help="of each half")
    parser.add_argument("--context", type=positive, default=7000, help="tokens of a prompt, about")
    parser.add_argument("--max-tokens", type=positive, default=96)
    parser.add_argument("--budget", type=positive, default=512, help="tokens a draft reads")
    parser.add_argument("--seed", type=int, default=0, help="chooses the prompts")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables")
    given = sys.argv[1:] if arguments is None else arguments
    parser.set_defaults(command=" ".join([parser.prog, *given]))
    return command.run(parser, measure, context_search_report.draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
