"""aspire demo: eight long prompts decoded with both methods, the answers compared, the times too."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from aspire_jax.cli import progress, setup
from aspire_jax.errors import InputError

if TYPE_CHECKING:
    from aspire_jax.comparing import Comparison
    from aspire_jax.loading import Model
    from aspire_jax.request import Prepared
    from aspire_jax.results import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--model", default="smollm2-135m", metavar="M", help="converted folder, or smollm2-135m (default)"
    )
    parser.add_argument(
        "--context", type=setup.positive, default=6000, metavar="N", help="tokens a prompt (default: 6000)"
    )
    parser.add_argument("--prompts", type=setup.positive, default=8, metavar="K", help="default: 8")
    parser.add_argument("--max-tokens", type=setup.positive, default=64, metavar="N", help="default: 64")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME=VALUE", help="an option of aspire")
    setup.add_implementation(parser)
    parser.add_argument("--rounds", type=setup.positive, default=2, metavar="R", help="decode R times, the best counts")
    parser.add_argument("--quiet", "-q", action="store_true", help="print the result alone")
    setup.add_json(parser, "the figures and answers")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 1 where an answer differs other than at a near tie, else 0."""
    how = {"options": setup.policy_options("aspire", args.policy), "implementation": args.implementation}
    quiet = args.quiet or args.json == "-"
    model = setup.load_model(args.model, quiet=quiet)
    prepared = _prepare(args, model)
    from aspire_jax.comparing import compare
    from aspire_jax.sizing import engine_for

    try:
        engine_for(model, prepared, method="aspire", slots=len(prepared), **how)
    except ValueError as error:
        raise setup.refused(error) from error

    if not quiet:
        lengths = [len(r.tokens) for r in prepared]
        print(f"{model.name} ({model.dtype}), {len(prepared)} prompts of {min(lengths):,} to {max(lengths):,} tokens")
    with progress.Reporter(quiet=quiet) as reporter:

        def tell(name: str, report: Report) -> None:
            reporter(report, name)

        found = compare(model, prepared, rounds=args.rounds, progress=tell, **how)
    if args.json:
        setup.write_json(args.json, _figures(args, model, prepared, found))
    if not quiet:
        _print(found)
    if args.json != "-":
        print(verdict(found))
    return 1 if found.defects else 0


def verdict(found: Comparison) -> str:
    """The last line."""
    accepted = found.best[1].mean_accepted_length
    return (
        f"exact {found.exact}/{len(found.reference)}, decode speedup {found.speedup:.2f}x, mean accepted {accepted:.1f}"
    )


def _prepare(args: argparse.Namespace, model: Model) -> list[Prepared]:
    from aspire_jax import request
    from aspire_jax.cli import demo_prompts

    longest = model.config.max_length
    if args.context + args.max_tokens > longest or args.context < 256:
        most = longest - args.max_tokens
        raise InputError(f"--context: {args.context}, expected 256 to {most} ({longest} less --max-tokens)")
    if model.tokenizer is None:
        raise InputError(f"model {model.name}: no tokenizer, expected a folder converted with its tokenizer")
    requests = demo_prompts.requests(model.tokenizer, args.context, args.prompts)
    return request.prepare(model, requests, max_tokens=args.max_tokens, truncate=True)


def _print(found: Comparison) -> None:
    """Answers' beginnings, then a row for each method."""
    print()
    for answer in found.candidate:
        text = " ".join(answer.text.split())
        print(f"{answer.id}\n    {text[:150]}{'...' if len(text) > 150 else ''}")
    print()
    prefill = found.prefill
    rate = prefill.prefilled / prefill.prefill_seconds
    print(
        f"prefill, once for both: {prefill.prefilled:,} tokens in {prefill.prefill_seconds:.1f} s ({rate:.0f} tokens/s)"
    )
    print(
        f"{'decode':<16}{'tokens/s':>10}{'tokens':>10}{'seconds':>10}{'steps':>8}{'accepted':>10}{'mean accepted':>15}"
    )
    for name, r in zip(("autoregressive", "aspire"), found.best, strict=True):
        acceptance = f"{r.acceptance:.0%}" if r.drafted else "-"
        print(
            f"{name:<16}{r.tokens_per_second:>10.1f}{r.completion_tokens:>10,}{r.decode_seconds:>10.2f}{r.steps:>8}"
            f"{acceptance:>10}{r.mean_accepted_length:>15.2f}"
        )
    for d in found.differences:
        what = "a near tie" if d.near_tie else "NOT a near tie"
        print(f"{found.reference[d.index].id}: differs from token {d.position} on, {what} (margin {d.margin:.2g})")


def _figures(args: argparse.Namespace, model: Model, prepared: list[Prepared], found: Comparison) -> dict[str, Any]:
    return {
        "model": model.name,
        "dtype": model.dtype,
        "prompts": len(prepared),
        "prompt_tokens": [len(r.tokens) for r in prepared],
        "max_tokens": args.max_tokens,
        "implementation": args.implementation,
        "exact": found.exact,
        "speedup": found.speedup,
        "mean_accepted": found.best[1].mean_accepted_length,
        "prefill_seconds": found.prefill.prefill_seconds,
        "differences": [
            {"id": found.reference[d.index].id, "position": d.position, "margin": d.margin, "near_tie": d.near_tie}
            if d.margin != float("inf")
            else {"id": found.reference[d.index].id, "position": d.position, "margin": None, "near_tie": False}
            for d in found.differences
        ],
        "rounds": {
            "autoregressive": [r.as_dict() for r in found.reference_reports],
            "aspire": [r.as_dict() for r in found.candidate_reports],
        },
        "answers": [answer.as_dict() for answer in found.candidate],
    }
