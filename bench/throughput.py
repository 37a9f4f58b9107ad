"""ASPIRE against AutoRegressive: step times, decode speed on several workloads, and what the step times allow.

    python -m bench.throughput [--data FILE ...] [--json FILE] [--quick]

Everything is measured in one process, both methods on the same prefilled prompts in turns. Absolute times belong to the
machine; the ratios are the result.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from aspire_jax import load
from aspire_jax.cli.setup import positive, write_json
from aspire_jax.comparing import Comparison, compare
from aspire_jax.loading import Model
from aspire_jax.request import Prepared
from bench import machine, step_times, workloads


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a converted folder or an alias")
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE", help="prompts (JSONL: id, prompt)")
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--context", type=positive, default=7000, help="tokens of a prompt, about")
    parser.add_argument("--max-tokens", type=positive, default=128)
    parser.add_argument("--rounds", type=positive, default=3, help="how often each method decodes")
    parser.add_argument("--seed", type=int, default=0, help="chooses the prompts")
    parser.add_argument("--quick", action="store_true", help="short contexts, few tokens: about two minutes")
    parser.add_argument("--json", metavar="FILE", help="write the results; - for standard output alone")
    args = parser.parse_args()
    if args.quick:
        args.context, args.max_tokens, args.rounds = min(args.context, 1024), 32, 1
    try:
        results = measure(args)
    except (ValueError, OSError) as error:
        parser.exit(2, f"throughput: error: {error}\n")
    if args.json:
        write_json(args.json, results)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures; tells them as they come."""
    quiet = args.json == "-"

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    loaded = load(args.model)
    command = " ".join(["python -m bench.throughput", *sys.argv[1:]])
    results: dict[str, Any] = {"command": command, "model": loaded.name, "dtype": loaded.dtype}
    results |= {"machine": machine.describe(), "rates": machine.rates()}
    rates = results["rates"]
    say(f"{results['machine']}\nreads {rates['read_gb_s']:.1f} GB/s, products {rates['matmul_gflop_s']:.0f} GFLOP/s")
    times = step_times.measure(loaded, args.prompts, args.context, (1, 2, 3, 4, 5), rounds=2 if args.quick else 6)
    results["steps"] = {**times, **_against_rates(loaded, args, times, rates)}
    say(_steps_table(args, results["steps"]))
    results["workloads"] = []
    for name, requests in _workloads(loaded, args):
        found = compare(loaded, requests, rounds=args.rounds)
        row = _row(name, requests, found)
        if name == "main":
            row |= _ceilings(times, found)
        results["workloads"].append(row)
        say(_row_text(row))
    results["rates_after"] = machine.rates()
    return results


def _workloads(loaded: Model, args: argparse.Namespace) -> list[tuple[str, list[Prepared]]]:
    short = min(2000, args.context)
    n, new, seed = args.prompts, args.max_tokens, args.seed
    return [
        ("main", workloads.near(loaded, args.data, n, args.context, new, seed)),
        ("short", workloads.near(loaded, args.data, n, short, new, seed)),
        ("one row", workloads.near(loaded, args.data, 1, args.context, new, seed)),
        ("random tokens", workloads.random_tokens(loaded, n, short, new, seed)),
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
    plain, aspire = found.best
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
        "aspire": aspire.as_dict(),
    }


def _row_text(row: dict[str, Any]) -> str:
    tokens = row["prompt_tokens"]
    plain, aspire = row["autoregressive"], row["aspire"]
    text = (
        f"{row['workload']}: {row['prompts']} x {sum(tokens) // len(tokens)} tokens: "
        f"autoregressive {plain['tokens_per_second']:.1f}, aspire {aspire['tokens_per_second']:.1f} tokens/s, "
        f"{row['speedup']:.2f}x (rounds {', '.join(f'{x:.2f}' for x in row['speedup_per_round'])}), "
        f"acceptance {aspire['acceptance']:.0%}, mean accepted {aspire['mean_accepted_length']:.2f}, "
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
    main()
