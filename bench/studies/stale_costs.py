"""Step costs that no longer hold: fitted on one card, used on two, and fitted anew while decoding (table 4).

Both machines are priced by data sheets (`bench.simulation.cards`): two cards halve reads and products, not the
launches, and add all-reduces, so a draft comes to cost more of a verification than the scheduler believes. Beside that,
one coefficient wrong by a factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aspire_jax.costs import Fit
from bench import plots, schedulers
from bench.gpu_models import MODELS
from bench.simulation import cards, drift, machine
from bench.simulation.replay import Scene
from bench.studies import replays
from bench.studies.runs import Runs
from bench.studies.study import PAPER, Result, Study, head, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL = "Qwen3-8B"
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Runs of steps that the fit is told of, and those at the end that count.
_RUNS, _COUNTED, _RUN_STEPS = 40, 20, 64


def measure(runs: Runs) -> Result:
    """Speedup over plain decoding on two cards by what the scheduler believes."""
    known = runs.acceptances(replays.ASPIRE.d_max)
    one, two = (cards.coefficients(MODELS[MODEL], cards.CARDS[cards.PAPERS], n) for n in (1, 2))
    table = machine.tables()["tensor_parallel_qwen3_8b"]["rows"]
    published = {(workload, ways): speedup for workload, ways, *_, speedup in table}
    scenes = {
        workload: Scene(schedulers.at_length(known, machine.context(workload, MODEL, "ASPIRE")), batch, two, two)
        for workload, ways, batch, *_ in table
        if ways == "2"
    }
    believed = {"fitted": two, "stale": one}
    cases = []
    for name, policy in replays.POLICIES.items():
        tried = [scene._replace(believed=b) for scene in scenes.values() for b in believed.values()]
        found = iter(replays.mixed(policy, tried, runs.sizes.steps))
        for workload, scene in scenes.items():
            plain = schedulers.plain_speed(scene)
            row = {way: next(found).tokens_per_second / plain for way in believed}
            row["fitted while decoding"] = _followed(policy, scene._replace(believed=one), runs.sizes.quick) / plain
            cases.append({"workload": workload, "method": name, "batch": scene.batch, "speedup": row})
    paper = [
        {"workload": w, "fitted": published[w, "2"], "stale": published[w, "2 stale"]} for w in scenes
    ]  # fmt: skip
    return {
        "model": MODEL,
        "card": cards.PAPERS,
        "coefficients": {"one card": one.tolist(), "two cards": two.tolist()},
        "cases": cases,
        "wrong_by": _wrong(list(scenes.values()), runs.sizes.steps),
        "paper": paper,
    }


def _followed(policy: object, scene: Scene, quick: bool) -> float:
    """Tokens per second once the fit, which begins with what the scene believes, has seen the machine."""
    fit = Fit(scene.believed)
    runs = _RUNS // 2 if quick else _RUNS
    truth = [scene.truth] * runs
    speeds = drift.follow(
        policy, scene, truth, mixed=True, shapes=machine.ExactShapes(), fit=fit, steps=_RUN_STEPS  # type: ignore[arg-type]
    )  # fmt: skip
    # The harmonic mean is that of runs of equal work; runs here are of equal steps and of much the same time.
    return float(np.mean(speeds[-_COUNTED:]))


def _wrong(scenes: list[Scene], steps: int) -> list[Result]:
    """Tokens per second against those with true costs, where a coefficient is believed to be so many times it."""
    out = []
    for name, policy in replays.POLICIES.items():
        for place, term in ((0, "the step's constant"), (2, "reading a context token")):
            tried = []
            for scene in scenes:
                for factor in FACTORS:
                    believed = scene.truth.copy()
                    believed[place] *= np.float32(factor)
                    tried.append(scene._replace(believed=believed))
            speeds = np.array([r.tokens_per_second for r in replays.mixed(policy, tried, steps)])
            table = speeds.reshape(len(scenes), len(FACTORS))
            to = (table / table[:, [FACTORS.index(1.0)]]).mean(axis=0)
            out.append({"method": name, "term": term, "factors": list(FACTORS), "to_true": to.tolist()})
    return out


def bars(axes: Axes, result: Result) -> None:
    """Right costs, stale ones, and those fitted while decoding; the paper's as its own groups."""
    from matplotlib.patches import Rectangle

    ways = {
        "fitted": "fitted on two cards",
        "stale": "fitted on one (stale)",
        "fitted while decoding": "while decoding",
    }
    groups = []
    series: dict[str, list[float | None]] = {label: [] for label in ways.values()}
    for row in result["paper"]:
        groups.append(f"paper, aspire\n{row['workload']}")
        for way, label in ways.items():
            series[label].append(row.get(way))
    for case in result["cases"]:
        groups.append(f"here, {case['method']}\n{case['workload']}")
        for way, label in ways.items():
            series[label].append(case["speedup"][way])
    plots.bars(axes, groups, series, label="", text=None)
    for bar in (patch for patch in axes.patches if isinstance(patch, Rectangle)):
        middle, height = bar.get_x() + bar.get_width() / 2, bar.get_height()
        axes.text(middle, height - 0.05, f"{height:.2f}", rotation=90, fontsize=7, color="white", ha="center", va="top")
    axes.axvline(len(result["paper"]) - 0.5, color=PAPER, ymax=0.86, linewidth=0.8, linestyle="--")
    axes.axhline(1, color=plots.INK, linewidth=0.8)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    head(axes, f"Stale costs: {result['model']} on two cards, costs of one", "", "times AutoRegressive on two cards")
    legend(axes, 3, "upper left")


def curve(axes: Axes, result: Result) -> None:
    """What a wrong coefficient costs."""
    colour = plots.colours(replays.POLICIES)
    for row in result["wrong_by"]:
        style = "o-" if row["term"] == "the step's constant" else "s--"
        axes.plot(
            row["factors"], [100 * (v - 1) for v in row["to_true"]], style, color=colour[row["method"]], markersize=4,
            linewidth=1.2, label=f"{row['method']}, {row['term']}",
        )  # fmt: skip
    paper = {row["workload"]: row["stale"] / row["fitted"] for row in result["paper"]}
    workload = min(paper, key=lambda name: paper[name])
    loss = 100 * (paper[workload] - 1)
    axes.axhline(loss, color=PAPER, linewidth=1, linestyle=":")
    axes.text(1.1, loss + 0.5, f"paper, stale costs on {workload}: {loss:.0f} %", fontsize=7, color=PAPER)
    axes.set_xscale("log", base=2)
    axes.set_xticks(FACTORS, [f"{f:g}" for f in FACTORS])
    axes.axhline(0, color=plots.INK, linewidth=0.8)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.55 * (high - low))
    head(axes, "One cost coefficient wrong", "believed, times the true value", "tokens/s against true costs, %")
    legend(axes, 1, "upper left")


def tell(result: Result) -> list[str]:
    lines = [f"{result['model']} on two {result['card']}: speedup with costs fitted, stale, fitted while decoding"]
    for row in result["paper"]:
        lines.append(f"  paper  aspire    {row['workload']:13s} {row['fitted']:.2f} {row['stale']:.2f}")
    for case in result["cases"]:
        told = " ".join(f"{v:.2f}" for v in case["speedup"].values())
        lines.append(f"  here   {case['method']:9s} {case['workload']:13s} {told}")
    for row in result["wrong_by"]:
        told = ", ".join(f"{f:g}: {100 * (v - 1):+.1f} %" for f, v in zip(row["factors"], row["to_true"], strict=True))
        lines.append(f"  {row['method']}, {row['term']} wrong by {told}")
    return lines


STUDY = Study(
    "stale_costs",
    "Step costs that no longer hold",
    "table 4",
    measure,
    (bars, curve),
    tell,
)
