"""Schedulers on recorded acceptances, by several machines' step times; and which signals foretell a rejection.

    python -m bench.schedulers --traces FILE ... [--json FILE] [--plot FILE]

The traces are made by `aspire trace --cadence every`. Every policy decides on the same recorded drafts; time passes by
the paper's machine (coefficients solved from its tables; rows mix) and by a two-core CPU (rows march, with the engine's
own step shapes). Speedups are over plain decoding on the same machine; hindsight drafts exactly what is accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from aspire_jax import tracing
from aspire_jax.cli.setup import positive
from aspire_jax.draft_length import (
    AdaptiveDraftLength,
    AspireDraftLength,
    DraftLengthPolicy,
    FixedDraftLength,
    FsmDraftLength,
    likelihood,
)
from aspire_jax.shapes import Shapes
from bench import command, machine, plots
from bench.simulation import hindsight, recorded
from bench.simulation import machine as papers
from bench.simulation.acceptance import Acceptance
from bench.simulation.replay import Result, Scene, replay

POLICIES: dict[str, DraftLengthPolicy] = {
    "fixed 3": FixedDraftLength(gamma=3),
    "fixed 5": FixedDraftLength(gamma=5),
    "fsm": FsmDraftLength(),
    "aspire": AspireDraftLength(in_step=False),
    "adaptive, blind": AdaptiveDraftLength(confidence=False),
    "adaptive": AdaptiveDraftLength(),
}
SETTINGS = (
    ("Qwen3-8B", "AIME25"),
    ("Qwen3-8B", "LB-v2[30k-40k]"),
    ("Qwen3-8B", "LB-v2[80k-100k]"),
    ("Qwen3-1.7B", "LB[16k-18k]"),
)
# A two-core CPU with SmolLM2-135M, solved from bench.throughput's step times at 8 x 7000.
CPU = np.array([0.036, 0.0014, 1.3e-6, 7.8e-7], np.float32)
CPU_BATCH, CPU_CAPACITY = 8, 7168
SIGNALS = {"top_probability": 1, "margin": 1, "entropy": -1, "outside": -1}


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("schedulers", __doc__, quick="few steps", plot="each scheduler's speedup")
    parser.add_argument("--traces", nargs="+", required=True, metavar="FILE", help="made by aspire trace")
    parser.add_argument("--steps", type=positive, default=4000, help="steps of each simulated run")
    return command.run(parser, measure, draw, arguments)


def measure(args: argparse.Namespace, say: command.Say) -> command.Results:
    traces = [tracing.load(file) for file in args.traces]
    known = recorded.acceptance(traces)
    steps = 500 if args.quick else args.steps
    results: command.Results = {"machine": machine.describe(), "traces": [t.meta for t in traces], "steps": steps}
    results |= {"requests": known.run.shape[0], "positions": known.run.shape[1]}
    results["settings"] = [*_on_gpu(known, steps), _on_cpu(known, steps)]
    ratios = [s["speedup"]["adaptive"] / s["speedup"]["aspire"] for s in results["settings"]]
    results["adaptive_to_aspire"] = {"mean": statistics.mean(ratios), "least": min(ratios)}
    results["signals"] = signals(traces)
    results["margins"] = by_margin(traces)
    say(_text(results))
    return results


def scenes(known: Acceptance, settings: Sequence[tuple[str, str]]) -> list[Scene]:
    """The paper's models and workloads with its step times and its batch for ASPIRE, but these acceptances."""
    out = []
    for model, workload in settings:
        costs, batch = papers.mixed_coefficients(workload, model), papers.row(workload, model, "ASPIRE").batch
        out.append(Scene(at_length(known, papers.context(workload, model)), batch, costs, costs))
    return out


def plain_speed(scene: Scene) -> float:
    """Tokens per second of the scene's batch without drafts, at the middle of its requests."""
    step, token, read, pair = scene.truth.astype(float)
    length = float(scene.traces.start[0]) + scene.traces.run.shape[1] / 2
    return scene.batch / (step + scene.batch * (token + (read + pair) * length))


def _on_gpu(known: Acceptance, steps: int) -> list[dict[str, Any]]:
    of = scenes(known, SETTINGS)
    found = {
        name: replay(p, of, mixed=not isinstance(p, FixedDraftLength), shapes=papers.ExactShapes(), steps=steps)
        for name, p in POLICIES.items()
    }
    out = []
    for i, ((model, workload), scene) in enumerate(zip(SETTINGS, of, strict=True)):
        plain = plain_speed(scene)
        row = _row(f"{model}, {workload}, B = {scene.batch}", plain, {n: r[i] for n, r in found.items()})
        row["speedup"]["hindsight"] = hindsight.tokens_per_second(scene) / plain
        out.append(row)
    return out


def _on_cpu(known: Acceptance, steps: int) -> dict[str, Any]:
    start = CPU_CAPACITY - known.run.shape[1] - 64
    scene = Scene(at_length(known, start), CPU_BATCH, CPU, CPU, share=0.0, least=512.0)
    found = {}
    for name, policy in POLICIES.items():
        if isinstance(policy, FsmDraftLength):  # its rows go their own ways, which the engine does not offer there
            continue
        if isinstance(policy, AspireDraftLength):
            policy = dataclasses.replace(policy, in_step=True)
        shapes = Shapes(
            batch=CPU_BATCH,
            d_max=policy.d_max,
            capacity=CPU_CAPACITY,
            block=2048,
            dense=True,
            refreshes=0.0,
            mixed=False,
        )
        found[name] = replay(policy, [scene], mixed=False, shapes=shapes, steps=steps)[0]
    step, token, read, pair = CPU.astype(float)
    plain = CPU_BATCH / (step + CPU_BATCH * (token + (read + pair) * CPU_CAPACITY))
    return _row(f"two-core CPU, SmolLM2, {CPU_BATCH} x {CPU_CAPACITY}", plain, found)


def at_length(known: Acceptance, length: float) -> Acceptance:
    """The same acceptances at another context length in tokens."""
    return known._replace(start=np.full_like(known.start, int(length)))


def _row(name: str, plain: float, found: dict[str, Result]) -> dict[str, Any]:
    return {
        "setting": name,
        "plain_tokens_per_second": plain,
        "speedup": {n: r.tokens_per_second / plain for n, r in found.items()},
        "tokens_per_verification": {n: r.per_verification for n, r in found.items()},
        "acceptance": {n: r.acceptance for n, r in found.items()},
    }


def signals(traces: list[tracing.Trace]) -> dict[str, float | None]:
    """Area under the ROC curve of each signal, accepted against rejected drafts; drafts behind a rejection left out."""
    out: dict[str, float | None] = {}
    for name, sign in SIGNALS.items():
        value, accepted = _tried(traces, name)
        good = ~np.isnan(value)
        out[name] = auc(sign * value[good], accepted[good]) if good.any() else None
    return out


def _tried(traces: list[tracing.Trace], name: str) -> tuple[np.ndarray, np.ndarray]:
    values, accepted = [], []
    for t in traces:
        place = np.arange(t.draft.shape[1])[None]
        tried = (place < t.drafted[:, None]) & (place <= t.accepted[:, None])
        values.append(getattr(t, name)[tried])
        accepted.append((place < t.accepted[:, None])[tried])
    return np.concatenate(values), np.concatenate(accepted)


def auc(score: np.ndarray, positive_class: np.ndarray) -> float:
    """Chance that a positive scores above a negative, ties counting half (Mann and Whitney's U)."""
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2
    n, m = positive_class.sum(), (~positive_class).sum()
    if not n or not m:
        return float("nan")
    return float((rank[place][positive_class].sum() - n * (n + 1) / 2) / (n * m))


def by_margin(traces: list[tracing.Trace]) -> list[dict[str, float]]:
    """How often drafts of each of the adaptive policy's classes are accepted."""
    value, accepted = _tried(traces, "margin")
    kind = np.digitize(value, likelihood.EDGES)
    edges = [0.0, *likelihood.EDGES]
    return [
        {"above": edges[k], "drafts": int((kind == k).sum()), "accepted": float(accepted[kind == k].mean())}
        for k in range(len(edges))
        if (kind == k).any()
    ]


def _text(results: command.Results) -> str:
    names = [*POLICIES, "hindsight"]
    lines = [f"{results['requests']} requests x {results['positions']} positions; speedup over plain decoding"]
    lines.append(f"{'':38s}" + "".join(f"{n:>17s}" for n in names))
    for s in results["settings"]:
        cells = "".join(f"{s['speedup'][n]:17.2f}" if n in s["speedup"] else f"{'':>17s}" for n in names)
        lines.append(f"{s['setting']:38s}{cells}")
    ratio = results["adaptive_to_aspire"]
    lines.append(f"adaptive to aspire: {ratio['mean']:.3f} in the mean, {ratio['least']:.3f} at least")
    found = ", ".join(f"{n} {v:.3f}" for n, v in results["signals"].items() if v is not None)
    lines.append(f"area under the ROC curve, accepted against rejected: {found}")
    lines += [
        f"  margin above {m['above']:4.2f}: {m['drafts']:6d} drafts, {m['accepted']:.3f}" for m in results["margins"]
    ]
    return "\n".join(lines)


def draw(results: command.Results, file: str) -> None:
    made, axes = plots.figure("Schedulers on recorded acceptances", 1, width=9.5, height=4.0)
    names = [*POLICIES, "hindsight"]
    groups = [s["setting"].replace(", ", "\n", 1) for s in results["settings"]]
    series = {n: [s["speedup"].get(n) for s in results["settings"]] for n in names}
    plots.bars(axes[0], groups, series, label="speedup over plain decoding")
    plots.legend(axes[0], 7)
    plots.note(made, plots.where(results))
    plots.save(made, file)


if __name__ == "__main__":
    raise SystemExit(main())
