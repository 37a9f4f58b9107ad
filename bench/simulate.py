"""The paper's table 1 by simulation, and what our scheduler makes of the same acceptances.

    python -m bench.simulate [--json FILE] [--plot FILE] [--quick]

The library's own draft-length policies run step by step; only the model is replaced by acceptances (`simulation.paper`
says how they are drawn) and the clock by the cost model with coefficients solved from the paper's step times. For each
model and workload: the paper's speedup over AutoRegressive, the simulated one, their difference; then `adaptive`, which
the paper does not have, on the traces of ASPIRE; and how far hindsight would get. Last, by data sheets, what batch,
context, tensor parallelism and card change.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from aspire_jax.cli.setup import positive
from aspire_jax.draft_length import AdaptiveDraftLength, AspireDraftLength, DraftLengthPolicy, FixedDraftLength
from aspire_jax.methods import METHODS, MIXING_D_MAX
from bench import command, machine, plots
from bench.simulation import hindsight, paper, what_if
from bench.simulation.machine import GAMMA, MODELS, WORKLOADS, ExactShapes
from bench.simulation.paper import CELLS, MIXED, SYNCHRONISED, Cell
from bench.simulation.replay import Result, Scene, replay

TOLERANCE = 0.10


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("simulate", __doc__, quick="one seed, few steps", plot="paper against simulation")
    parser.add_argument("--seeds", type=positive, default=5, help="draws of the acceptances")
    parser.add_argument("--steps", type=positive, default=4000, help="steps of each simulated run")
    return command.run(parser, measure, draw, arguments)


def policy_of(method: str) -> DraftLengthPolicy:
    """The method's draft-length policy as on a GPU, where rows mix, and with the paper's draft lengths."""
    policy = METHODS[method].draft_length
    if isinstance(policy, FixedDraftLength):
        policy = FixedDraftLength(gamma=GAMMA)
    if isinstance(policy, AspireDraftLength):
        # The paper's rule alone: rows on their own ways, without our guard against losses.
        policy = dataclasses.replace(policy, in_step=False, regret_share=None)
    if isinstance(policy, AdaptiveDraftLength):
        policy = dataclasses.replace(policy, d_max=MIXING_D_MAX)
    return policy


def measure(args: argparse.Namespace, say: command.Say) -> command.Results:
    seeds, steps = (1, 1000) if args.quick else (args.seeds, args.steps)
    spreads = {cell: paper.spread(cell) for cell in CELLS}
    found: dict[str, dict[Cell, list[Result]]] = {}
    for method, name in SYNCHRONISED.items():
        scenes = {(c, s): paper.synchronised(c, name, s) for c in CELLS for s in range(seeds)}
        found[method] = _replayed(policy_of(method), scenes, steps, mixed=False)
    scenes = {(c, s): paper.mixed(c, spreads[c], s) for c in CELLS for s in range(seeds)}
    for method in (*MIXED, "adaptive"):
        found[method] = _replayed(policy_of(method), scenes, steps, mixed=True)
    best = {c: statistics.mean(hindsight.tokens_per_second(scenes[c, s]) for s in range(seeds)) for c in CELLS}
    cells = []
    for cell in CELLS:
        cells.append(_entry(cell, "autoregressive", 1.0, 1.0))
        for method, name in (SYNCHRONISED | MIXED).items():
            cells.append(_compared(cell, method, cell.paper(name), found[method][cell]))
        cells.append(_compared(cell, "adaptive", None, found["adaptive"][cell]))
    results: command.Results = {"machine": machine.describe(), "seeds": list(range(seeds)), "steps": steps}
    results |= {"cells": cells, "spread_of_log_odds": {f"{c.model}, {c.workload}": spreads[c] for c in CELLS}}
    results["adaptive"] = [_against(cell, found, best[cell]) for cell in CELLS]
    results["summary"] = _summary(results)
    say(_table(results))
    results["what_if"] = what_if.study(_two(), spreads[what_if.CELL], steps)
    say(what_if.table(results["what_if"]))
    return results


def _two() -> dict[str, DraftLengthPolicy]:
    """The paper's rule with our guard against losses, and ours."""
    return {"aspire": AspireDraftLength(in_step=False), "adaptive": policy_of("adaptive")}


def _replayed(
    policy: DraftLengthPolicy, scenes: dict[tuple[Cell, int], Scene], steps: int, *, mixed: bool
) -> dict[Cell, list[Result]]:
    results = replay(policy, list(scenes.values()), mixed=mixed, shapes=ExactShapes(), steps=steps)
    out: dict[Cell, list[Result]] = {}
    for (cell, _), result in zip(scenes, results, strict=True):
        out.setdefault(cell, []).append(result)
    return out


def _speed(results: list[Result]) -> float:
    return statistics.mean(r.tokens_per_second for r in results)


def _entry(cell: Cell, method: str, published: float | None, simulated: float) -> dict[str, Any]:
    return {
        "model": cell.model,
        "workload": cell.workload,
        "method": method,
        "paper_speedup": published,
        "simulated_speedup": simulated,
        "difference": None if published is None else simulated / published - 1,
    }


def _compared(cell: Cell, method: str, published: float | None, results: list[Result]) -> dict[str, Any]:
    speeds = [r.tokens_per_second / cell.plain for r in results]
    return _entry(cell, method, published, statistics.mean(speeds)) | {
        "simulated_range": [min(speeds), max(speeds)],
        "tokens_per_verification": statistics.mean(r.per_verification for r in results),
        "acceptance": statistics.mean(r.acceptance for r in results),
        "drafts_per_verification": statistics.mean(r.drafts for r in results),
    }


def _against(cell: Cell, found: dict[str, dict[Cell, list[Result]]], best: float) -> dict[str, Any]:
    ours, theirs = _speed(found["adaptive"][cell]), _speed(found["aspire"][cell])
    return {
        "model": cell.model,
        "workload": cell.workload,
        "adaptive_to_aspire": ours / theirs,
        "hindsight_to_aspire": best / theirs,
        "share_of_gap": (ours - theirs) / (best - theirs),
    }


def _summary(results: command.Results) -> dict[str, Any]:
    compared = [c for c in results["cells"] if c["paper_speedup"] is not None and c["method"] != "autoregressive"]
    within = [c for c in compared if abs(c["difference"]) <= TOLERANCE]
    ratios = [row["adaptive_to_aspire"] for row in results["adaptive"]]
    return {
        "cells": len(compared),
        "within_tolerance": len(within),
        "share_within": len(within) / len(compared),
        "misses": [c for c in compared if c not in within],
        "adaptive_to_aspire_mean": statistics.mean(ratios),
        "adaptive_to_aspire_least": min(ratios),
        "hindsight_to_aspire_mean": statistics.mean(row["hindsight_to_aspire"] for row in results["adaptive"]),
    }


def _table(results: command.Results) -> str:
    methods = [*SYNCHRONISED, *MIXED]
    lines = ["speedup over AutoRegressive: paper / simulated (* more than 10 % apart)"]
    lines.append(f"{'':30s}" + "".join(f"{m:>20s}" for m in (*methods, "adaptive")))
    for cell in CELLS:
        of = {c["method"]: c for c in results["cells"] if (c["model"], c["workload"]) == cell}
        text = f"{cell.model[:14]:15s}{cell.workload:15s}"
        for m in methods:
            star = "*" if abs(of[m]["difference"]) > TOLERANCE else " "
            text += f"{of[m]['paper_speedup']:12.2f} / {of[m]['simulated_speedup']:.2f}{star}"
        lines.append(f"{text}{of['adaptive']['simulated_speedup']:20.2f}")
    s = results["summary"]
    lines.append(
        f"within 10 %: {s['within_tolerance']} of {s['cells']} cells ({s['share_within']:.0%}); adaptive to aspire "
        f"{s['adaptive_to_aspire_mean']:.3f} in the mean, {s['adaptive_to_aspire_least']:.3f} at least; "
        f"hindsight to aspire {s['hindsight_to_aspire_mean']:.2f}"
    )
    return "\n".join(lines)


def draw(results: command.Results, file: str) -> None:
    made, axes = plots.figure("Speedup over AutoRegressive: paper and simulation", len(MODELS), width=6.2)
    for axis, model in zip(axes, MODELS, strict=True):
        axis.set_title(model)
        for method in (*SYNCHRONISED, *MIXED, "adaptive"):
            of = [c for c in results["cells"] if (c["model"], c["method"]) == (model, method)]
            colour = plots.colours([method])[method]
            axis.plot(range(len(of)), [c["simulated_speedup"] for c in of], "-", color=colour, label=method)
            published = [c["paper_speedup"] for c in of]
            if None not in published:
                axis.plot(range(len(of)), published, "o", color=colour, markersize=4)
        axis.set_xticks(range(len(WORKLOADS)), WORKLOADS, rotation=20)
        axis.set_ylabel("lines: simulated, dots: paper")
        axis.set_ylim(bottom=1)
    plots.legend(axes[0], 6)
    plots.note(made, plots.where(results))
    plots.save(made, file)


if __name__ == "__main__":
    raise SystemExit(main())
