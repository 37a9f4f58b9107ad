"""ASPIRE against AutoRegressive: single steps' times, what they allow, and what is reached on several workloads.

    python -m bench.ceiling [--data FILE ...] [--json FILE] [--plot FILE] [--quick]

Everything is measured in one process, both methods on the same prefilled prompts in turns. Absolute times belong to the
machine; the ratios are the result. All methods over several contexts and seeds: `bench.throughput`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from aspire_jax import load
from aspire_jax.cli import allocator
from aspire_jax.cli.setup import positive, use_compile_cache
from aspire_jax.comparing import Comparison, compare
from aspire_jax.loading import Model
from aspire_jax.request import Prepared
from bench import command, machine, plots, step_times, workloads


def main() -> int:
    allocator.settle()
    return command.run(parser(), measure, draw)


WORKLOADS = ("main", "short", "one-row", "random-tokens")
_QUICK = ("main", "random-tokens")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command.parser(
        "ceiling", __doc__, quick="two workloads of short contexts, few tokens", plot="step times and speedups"
    )
    made.add_argument("--model", default="smollm2-135m", help="a converted folder or an alias")
    made.add_argument("--data", nargs="+", default=[], metavar="FILE", help="prompts (see bench/datasets.py)")
    made.add_argument("--prompts", type=positive, default=8)
    made.add_argument("--context", type=positive, default=7000, help="tokens of a prompt, about")
    made.add_argument("--max-tokens", type=positive, default=128)
    made.add_argument("--rounds", type=positive, default=3, help="how often each method decodes")
    made.add_argument("--seed", type=int, default=0, help="chooses the prompts")
    made.add_argument("--method", default="aspire", help="what is compared with autoregressive (default: aspire)")
    made.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="default: all")
    return made


def measure(args: argparse.Namespace, say: command.Say) -> dict[str, Any]:
    """All figures; tells them as they come."""
    if args.quick:
        args.context, args.max_tokens, args.rounds = min(args.context, 1024), 32, 1
    chosen = args.workloads or (_QUICK if args.quick else WORKLOADS)
    use_compile_cache()
    loaded = load(args.model)
    results: dict[str, Any] = {"model": loaded.name, "dtype": loaded.dtype, "seed": args.seed, "method": args.method}
    results |= {"machine": machine.describe(), "rates": machine.rates()}
    rates = results["rates"]
    say(f"{plots.where(results)}\nreads {rates['read_gb_s']:.1f} GB/s, products {rates['matmul_gflop_s']:.0f} GFLOP/s")
    times = step_times.measure(loaded, args.prompts, args.context, (1, 2, 3, 4, 5), rounds=2 if args.quick else 6)
    results["steps"] = {**times, **_against_rates(loaded, args, times, rates)}
    say(_steps_table(args, results["steps"]))
    results["workloads"] = []
    for name, requests in _workloads(loaded, args):
        if name not in chosen:
            continue
        found = compare(loaded, requests, rounds=args.rounds, candidate=args.method)
        row = _row(name, requests, found)
        if name == "main":
            row |= _ceilings(times, found)
        results["workloads"].append(row)
        say.keep(results)
        say(_row_text(row, args.method))
    results["rates_after"] = machine.rates()
    return results


def draw(results: dict[str, Any], file: str) -> None:
    """Each kind of step in plain steps, and the speedup on each workload with its ceiling."""
    made, (left, right) = plots.figure(f"What a step costs, and what {results['method']} makes of it", 2, width=5)
    s = results["steps"]
    kinds = {"draft": s["draft"], "first draft": s["first_draft"]} | {
        f"verify {q}": seconds for q, seconds in s["verify"].items()
    }
    plots.bars(
        left, [k.replace(" ", "\n") for k in kinds], {"step": [t / s["plain"] for t in kinds.values()]}, label=""
    )
    left.set_title(f"time of a step / a plain one ({1e3 * s['plain']:.0f} ms)", fontsize=9)
    rows = results["workloads"]
    names = [f"{row['workload']}\n{row['prompts']} x {max(row['prompt_tokens']):,}" for row in rows]
    series = {
        results["method"]: [row["speedup"] for row in rows],
        "the step times allow": [row.get("ceiling") for row in rows],
        "were all drafts accepted": [row.get("ceiling_all_accepted") for row in rows],
    }
    plots.bars(right, names, series, label="")
    right.set_title("decode speed / AutoRegressive's", fontsize=9)
    for axes in (left, right):
        axes.axhline(1, color=plots.INK, linewidth=0.8)
    plots.legend(right)
    plots.note(made, plots.where(results))
    plots.save(made, file)


def _workloads(loaded: Model, args: argparse.Namespace) -> list[tuple[str, list[Prepared]]]:
    short = min(2000, args.context)
    n, new, seed = args.prompts, args.max_tokens, args.seed
    return [
        ("main", workloads.near(loaded, args.data, n, args.context, new, seed)),
        ("short", workloads.near(loaded, args.data, n, short, new, seed)),
        ("one-row", workloads.near(loaded, args.data, 1, args.context, new, seed)),
        ("random-tokens", workloads.random_tokens(loaded, n, short, new, seed)),
    ]


def _against_rates(
    loaded: Model, args: argparse.Namespace, times: dict[str, Any], rates: dict[str, float]
) -> dict[str, Any]:
    """A plain step against the time that reading its bytes and multiplying its products would take."""
    from aspire_jax import params

    c = loaded.config
    width = 4 if loaded.dtype == "float32" else 2
    read = params.count(c) * width + args.prompts * args.context * 2 * c.n_layers * c.n_kv_heads * c.head_dim * width
    flops = 2 * params.count(c) * args.prompts + args.prompts * args.context * 4 * c.n_layers * c.n_heads * c.head_dim
    return {
        "plain_read_gb": read / 1e9,
        "plain_read_share": read / 1e9 / rates["read_gb_s"] / times["plain"],
        "plain_product_share": flops / 1e9 / rates["matmul_gflop_s"] / times["plain"],
        "loop_overhead": times["plain"] / times["forward"] - 1,
    }


def _steps_table(args: argparse.Namespace, s: dict[str, Any]) -> str:
    plain = s["plain"]
    low, high = s["plain_quartiles"]
    low, high = low * 1e3, high * 1e3
    lines = [
        f"steps at {args.prompts} x {args.context} (medians of {s['rounds']})",
        f"  plain         {plain * 1e3:7.1f} ms ({low:.1f}-{high:.1f}): {s['plain_read_gb']:.2f} GB to read",
        f"  forward alone {s['forward'] * 1e3:7.1f} ms: the loop's own overhead is {s['loop_overhead']:.1%}",
        f"  first draft   {s['first_draft'] * 1e3:7.1f} ms = {s['first_draft'] / plain:.2f} plain",
        f"  draft         {s['draft'] * 1e3:7.1f} ms = {s['draft'] / plain:.2f} plain",
    ]
    for q, seconds in s["verify"].items():
        lines.append(f"  verify {q}      {seconds * 1e3:7.1f} ms = {seconds / plain:.2f} plain")
    lines.append(
        f"  of a plain step, reading at the measured rate would take {s['plain_read_share']:.0%}, "
        f"its products {s['plain_product_share']:.0%}"
    )
    return "\n".join(lines)


def _row(name: str, requests: list[Prepared], found: Comparison) -> dict[str, Any]:
    plain, candidate = found.best
    per_round = [
        b.tokens_per_second / a.tokens_per_second
        for a, b in zip(found.reference_reports, found.candidate_reports, strict=True)
    ]
    return {
        "workload": name,
        "prompts": len(requests),
        "prompt_tokens": [len(r.tokens) for r in requests],
        "prefill_tokens_per_second": found.prefill.prefilled / found.prefill.prefill_seconds,
        "exact": found.exact,
        "defects": len(found.defects),
        "speedup": found.speedup,
        "speedup_per_round": per_round,
        "autoregressive": plain.as_dict(),
        "candidate": candidate.as_dict(),
    }


def _row_text(row: dict[str, Any], method: str) -> str:
    tokens = row["prompt_tokens"]
    plain, found = row["autoregressive"], row["candidate"]
    text = (
        f"{row['workload']}: {row['prompts']} x {sum(tokens) // len(tokens)} tokens: "
        f"autoregressive {plain['tokens_per_second']:.1f}, {method} {found['tokens_per_second']:.1f} tokens/s, "
        f"{row['speedup']:.2f}x (rounds {', '.join(f'{x:.2f}' for x in row['speedup_per_round'])}), "
        f"acceptance {found['acceptance']:.0%}, mean accepted {found['mean_accepted_length']:.2f}, "
        f"exact {row['exact']}/{row['prompts']}; prefill {row['prefill_tokens_per_second']:.0f} tokens/s"
    )
    if "ceiling" in row:
        text += (
            f"\n  the step times allow {row['ceiling']:.2f}x at this acceptance (length {row['ceiling_drafts']}), "
            f"{row['ceiling_all_accepted']:.2f}x if every draft were accepted"
        )
    return text


def _ceilings(times: dict[str, Any], found: Comparison) -> dict[str, Any]:
    """What the measured step times allow, at the acceptance that this run had and at full acceptance."""
    best, drafts = step_times.ceiling(times, [found.best[1].acceptance])
    full, _ = step_times.ceiling(times, [1.0])
    return {"ceiling": best, "ceiling_drafts": drafts, "ceiling_all_accepted": full}


if __name__ == "__main__":
    sys.exit(main())
