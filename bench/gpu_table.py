"""What `bench.gpu` prints last: the figures beside their targets and the paper's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Shares of a copy's bandwidth that attention is to reach, over whole tables from this context on, and while drafting.
LONG, WHOLE, DRAFTING = 32_768, 0.85, 0.6
# A draft step of this model at that context, by the time to read its weights and selected pages.
MODEL, SLOWER = "Qwen3-8B", 1.4
_TERMS = ("step", "token", "context token", "pair")


def table(results: dict[str, Any]) -> str:
    """Kernels, steps, whole runs, what is missing, and the targets."""
    parts = (_kernels, _steps, _runs, _missing, targets)
    about = results["machine"]
    head = f"{about['device']}, jax {about['jax']}; copy {results.get('copy_gb_s')} GB/s"
    return "\n".join([head, *(line for part in parts for line in part(results))])


def _kernels(results: dict[str, Any]) -> Iterator[str]:
    for case in results.get("correctness") or ():
        yield f"  {case['case']:<34} error {case['error']:.1e} {'ok' if case['ok'] else 'WRONG'}"
    for case in results.get("bandwidth") or ():
        yield f"  {case['case']:<34} {case['microseconds']:9.1f} us {case['share_of_copy']:6.0%} of copy"


def _steps(results: dict[str, Any]) -> Iterator[str]:
    for name, found in results.items():
        if not name.endswith(": steps") or not found:
            continue
        yield f"{name.split(':')[0]}, {found['batch']} rows; single steps, and how often longer than their reads take"
        for s in found["steps"]:
            times = f" {s['milliseconds'] / s['least']:6.2f}x" if s["least"] else ""
            launch = f"command buffers {s['launch']}"
            yield f"  {s['kind']:<24} at {s['context']:<7} {launch:<20} {s['milliseconds']:8.2f} ms{times}"
        fit = found["fit"]
        terms = zip(
            ("step", "token", "context token", "pair"), fit["coefficients"], fit["standard_errors"], strict=True
        )
        yield "  fit, us: " + ", ".join(f"{what} {1e6 * b:.3g} +- {1e6 * e:.1g}" for what, b, e in terms)
        yield f"  fit: mean absolute error {fit['mean_absolute_percentage_error']:.1f} %"


def _runs(results: dict[str, Any]) -> Iterator[str]:
    """Speedups are over AutoRegressive with as many rows; the paper's baselines that hold more have fewer."""
    runs = [found for found in results.values() if isinstance(found, dict) and "tokens_per_second" in found]
    plain = {(r["model"], r["workload"]): r["tokens_per_second"] for r in runs if r["method"] == "autoregressive"}
    if runs:
        yield "whole runs                                        tokens/s  speedup  a verification | paper: the same"
    last = None
    for run in sorted(runs, key=lambda r: (r["model"], r["workload"])):
        where = (run["model"], run["workload"])
        if where != last:
            yield f"{run['model']}, {run['workload']}: {run['batch']} rows, {run['context']} tokens"
            last = where
        speedup = f"{run['tokens_per_second'] / plain[where]:8.2f}x" if where in plain else f"{'-':>9}"
        line = (
            f"  {run['method']:<44} {run['tokens_per_second']:11.1f} {speedup} {run['tokens_per_verification']:10.2f}"
        )
        paper = run["paper"]
        if paper:
            line += f"      | {paper['tokens_per_second']:8.1f} {paper['speedup']:6.2f}x"
            if paper["batch"] is not None:
                line += f" {paper['tokens_per_verification']:7.2f} ({paper['batch']} rows)"
        yield line


def _missing(results: dict[str, Any]) -> Iterator[str]:
    for name in results["skipped"]:
        yield f"  {name}: skipped"
    for error in results["errors"]:
        yield f"  {error['name']}: {error['error'].splitlines()[0][:120]}"


def targets(results: dict[str, Any]) -> Iterator[str]:
    """Each target that something was measured for, and whether it was reached."""
    for case in results.get("bandwidth") or ():
        least = DRAFTING if case["kind"] == "draft" else WHOLE
        if case["context"] >= LONG or case["kind"] == "draft":
            yield _verdict(
                f"{case['case']}, share of copy", case["share_of_copy"], least, case["share_of_copy"] >= least
            )
    steps = results.get(f"{MODEL}: steps") or {"steps": ()}
    for s in steps["steps"]:
        if s["kind"] == "draft" and s["context"] == LONG and s["least"]:
            times = s["milliseconds"] / s["least"]
            what = f"{MODEL}, draft step, command buffers {s['launch']}, times its reads"
            yield _verdict(what, times, SLOWER, times <= SLOWER)
    for name, found in results.items():
        launch = found.get("launch") if isinstance(found, dict) else None
        if launch:
            both = ", ".join(f"{how} {ms:.2f} ms" for how, ms in launch["milliseconds_of_all_kinds"].items())
            right = launch["faster"] == launch["library"]
            yield (
                f"{name.split(':')[0]}, command buffers: {both}; the library has them {launch['library']}"
                + ("" if right else f": set programs.LAUNCH to {launch['faster']!r}")
            )


def _verdict(what: str, found: float, bound: float, reached: bool) -> str:
    return f"target: {what} {found:.2f}, bound {bound:.2f}: {'reached' if reached else 'MISSED'}"
