"""How far the schedulers stay behind hindsight, which drafts exactly what will be accepted (table 3)."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from bench import plots, schedulers
from bench.simulation import hindsight, machine
from bench.studies import replays
from bench.studies.runs import Runs
from bench.studies.study import PAPER, Result, Study, head, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def measure(runs: Runs) -> Result:
    """Speedups over plain decoding of hindsight and of the schedulers, at the models and workloads of the table."""
    published = machine.tables()["oracle_gap"]["rows"]
    known = runs.acceptances(replays.ASPIRE.d_max)
    scenes = schedulers.scenes(known, [(model, workload) for model, workload, *_ in published])
    found = {name: replays.mixed(policy, scenes, runs.sizes.steps) for name, policy in replays.POLICIES.items()}
    cells = []
    for i, (scene, (model, workload, _, oracle, aspire, gap)) in enumerate(zip(scenes, published, strict=True)):
        plain, best = schedulers.plain_speed(scene), hindsight.tokens_per_second(scene)
        speeds = {name: results[i].tokens_per_second for name, results in found.items()}
        cells.append(
            {
                "model": model,
                "workload": workload,
                "batch": scene.batch,
                "speedup": {"hindsight": best / plain, **{name: speed / plain for name, speed in speeds.items()}},
                "gap": {name: 1 - speed / best for name, speed in speeds.items()},
                "paper": {"speedup": {"hindsight": oracle, "aspire": aspire}, "gap": gap / 100},
            }
        )
    names = list(replays.POLICIES)
    return {
        "cells": cells,
        "mean_gap": {name: statistics.fmean(c["gap"][name] for c in cells) for name in names},
        "paper_mean_gap": statistics.fmean(c["paper"]["gap"] for c in cells),
    }


def _groups(result: Result) -> list[str]:
    return [replays.cell(c["model"], c["workload"]) for c in result["cells"]]


def gaps(axes: Axes, result: Result) -> None:
    """The gap in each cell, with the paper's as marked points."""
    cells, names = result["cells"], list(result["mean_gap"])
    plots.bars(
        axes,
        _groups(result),
        {name: [100 * c["gap"][name] for c in cells] for name in names},
        label="tokens/s lost against hindsight, %",
        text="{:.0f}",
    )
    axes.plot(
        range(len(cells)), [100 * c["paper"]["gap"] for c in cells], "D", color=PAPER, markersize=6,
        label="aspire in the paper",
    )  # fmt: skip
    head(axes, "Gap to hindsight", "", "tokens/s lost against hindsight, %")
    axes.tick_params(axis="x", labelsize=7)
    axes.margins(y=0.4)
    legend(axes, 3, "upper left")


def speedups(axes: Axes, result: Result) -> None:
    """Speedups over plain decoding: here as lines, in the paper as points."""
    cells = result["cells"]
    colour = plots.colours(["hindsight", "aspire", "adaptive"]) | {"hindsight": "#222222"}
    for name in ("hindsight", "adaptive", "aspire"):
        values = [c["speedup"][name] for c in cells]
        axes.plot(
            range(len(cells)), values, "o-", color=colour[name], linewidth=1, markersize=3.5, label=f"{name}, here"
        )
    for name, mark in (("hindsight", "D"), ("aspire", "s")):
        values = [c["paper"]["speedup"][name] for c in cells]
        axes.plot(
            range(len(cells)), values, mark, color=colour[name], markersize=6, fillstyle="none",
            label=f"{'oracle' if name == 'hindsight' else name}, paper",
        )  # fmt: skip
    axes.set_xticks(range(len(cells)), _groups(result), fontsize=7)
    axes.set_ylim(1, 1.35 * max(axes.get_ylim()[1], 2))
    head(axes, "Hindsight and schedulers over plain decoding", "", "times AutoRegressive")
    legend(axes, 2, "upper left")


def tell(result: Result) -> list[str]:
    lines = ["speedup over plain decoding here (paper); gap to hindsight"]
    for c in result["cells"]:
        s, p = c["speedup"], c["paper"]["speedup"]
        lines.append(
            f"  {c['model'][:14]:15s}{c['workload']:15s} hindsight {s['hindsight']:.2f} ({p['hindsight']:.2f})  aspire "
            f"{s['aspire']:.2f} ({p['aspire']:.2f})  adaptive {s['adaptive']:.2f}; gaps {c['gap']['aspire']:.1%} "
            f"({c['paper']['gap']:.1%}), {c['gap']['adaptive']:.1%}"
        )
    mean = result["mean_gap"]
    lines.append(
        f"mean gap: aspire {mean['aspire']:.1%}, adaptive {mean['adaptive']:.1%}; paper {result['paper_mean_gap']:.1%}"
    )
    return lines


STUDY = Study(
    "oracle_gap",
    "Schedulers against hindsight: recorded acceptances, the paper's step times",
    "table 3",
    measure,
    (gaps, speedups),
    tell,
)
