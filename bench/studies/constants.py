"""How much the schedulers' constants matter: ASPIRE's w, alpha_0 and gamma_init; keep and alpha_0 of `adaptive`.

One constant at a time around the defaults; the paper varies w on one workload. A constant that a request forgets again
when it ends (alpha_0, gamma_init) weighs more on recorded answers as short as these than on long ones.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench import plots, schedulers
from bench.simulation import machine
from bench.studies import replays
from bench.studies.runs import Runs
from bench.studies.study import OURS, PAPER, Result, Study, head, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VALUES: dict[str, dict[str, tuple[float, ...]]] = {
    "aspire": {
        "w": (0.4, 0.6, 0.8, 0.9, 0.95),
        "alpha_0": (0.5, 0.7, 0.8, 0.9, 0.98),
        "gamma_init": (1, 3, 5, 8),
    },
    "adaptive": {"keep": (0.5, 0.7, 0.8, 0.9, 0.95, 0.99), "alpha_0": (0.5, 0.65, 0.8, 0.9, 0.95)},
}
# Where the paper varies w.
CELL = ("Qwen3-8B", "LB[16k-18k]")


def measure(runs: Runs) -> Result:
    """Tokens per second of every value against the default's, in each setting."""
    settings = list(dict.fromkeys([CELL, *schedulers.SETTINGS]))
    scenes = schedulers.scenes(runs.acceptances(replays.ASPIRE.d_max), settings)
    rows = []
    for method, constants in VALUES.items():
        policy: Any = replays.POLICIES[method]
        default = [r.tokens_per_second for r in replays.mixed(policy, scenes, runs.sizes.steps)]
        for name, values in constants.items():
            known = getattr(policy, name)
            for value in _chosen(values, known, runs.sizes.quick):
                varied = dataclasses.replace(policy, **{name: value})
                speeds = default if value == known else _speeds(varied, scenes, runs.sizes.steps)
                to = [speed / base for speed, base in zip(speeds, default, strict=True)]
                rows.append(
                    {
                        "method": method,
                        "constant": name,
                        "value": value,
                        "default": value == known,
                        "to_default": dict(zip((", ".join(s) for s in settings), to, strict=True)),
                        "mean": statistics.fmean(to),
                    }
                )
    sweep = machine.tables()["omega_sweep_qwen3_8b_lb16"]
    base = sweep["tok_s"][sweep["omega"].index(0.8)]
    paper = [{"w": w, "to_default": speed / base} for w, speed in zip(sweep["omega"], sweep["tok_s"], strict=True)]
    return {"rows": rows, "paper_w": paper, "paper_setting": ", ".join(CELL)}


def _chosen(values: Sequence[float], default: float, quick: bool) -> list[float]:
    return [v for v in values if not quick or v in (values[0], default)]


def _speeds(policy: Any, scenes: Sequence[Any], steps: int) -> list[float]:
    return [r.tokens_per_second for r in replays.mixed(policy, scenes, steps)]


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def papers_w(axes: Axes, result: Result) -> None:
    """The paper's sweep of w beside ours on the same workload."""
    rows = [r for r in result["rows"] if (r["method"], r["constant"]) == ("aspire", "w")]
    values = [r["value"] for r in rows]
    axes.plot(
        values, [_percent(r["to_default"][result["paper_setting"]]) for r in rows], "o-", color=OURS,
        label="here, the same step times",
    )  # fmt: skip
    axes.plot(
        [p["w"] for p in result["paper_w"]], [_percent(p["to_default"]) for p in result["paper_w"]], "D--",
        color=PAPER, label="paper",
    )  # fmt: skip
    axes.axhline(0, color=plots.INK, linewidth=0.8)
    axes.margins(y=0.3)
    head(
        axes,
        f"Constant w of aspire on {result['paper_setting']}",
        "w, weight of the old rate",
        "tokens/s against w = 0.8, %",
    )
    legend(axes, 2, "upper left")


def others(method: str) -> Any:
    """A panel of one method's constants over all settings."""

    def draw(axes: Axes, result: Result) -> None:
        colour = plots.colours([method])[method]
        of: dict[str, list[Mapping[str, Any]]] = {}
        for row in result["rows"]:
            if row["method"] == method:
                of.setdefault(row["constant"], []).append(row)
        x, ticks, labels = 0.0, [], []
        for name, rows in of.items():
            places = [x + i for i in range(len(rows))]
            for place, row in zip(places, rows, strict=True):
                found = [_percent(v) for v in row["to_default"].values()]
                axes.plot([place, place], [min(found), max(found)], color=colour, alpha=0.35, linewidth=4)
            axes.plot(places, [_percent(r["mean"]) for r in rows], "o-", color=colour, linewidth=1)
            axes.text(
                statistics.fmean(places), 0.96, name, transform=axes.get_xaxis_transform(), ha="center", fontsize=9
            )
            ticks += places
            labels += [f"{r['value']:g}{'*' if r['default'] else ''}" for r in rows]
            x = places[-1] + 2
        axes.axhline(0, color=plots.INK, linewidth=0.8)
        axes.set_xticks(ticks, labels, fontsize=7)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.25 * (high - low))
        head(
            axes,
            f"Constants of {method}",
            "value (* default); bars: range over 5 settings",
            "tokens/s against default, %",
        )

    return draw


def tell(result: Result) -> list[str]:
    lines = ["tokens/s against the default's, mean over settings"]
    for row in result["rows"]:
        mark = " (default)" if row["default"] else ""
        found = [_percent(v) for v in row["to_default"].values()]
        lines.append(
            f"  {row['method']:9s}{row['constant']:11s}{row['value']:5g} {_percent(row['mean']):+6.1f} % "
            f"({min(found):+.1f} to {max(found):+.1f}){mark}"
        )
    told = ", ".join(f"{p['w']:g}: {_percent(p['to_default']):+.1f} %" for p in result["paper_w"])
    lines.append(f"  paper, w on {result['paper_setting']}: {told}")
    return lines


STUDY = Study(
    "constants",
    "Constants of the estimators, one at a time",
    "sweep of w",
    measure,
    (papers_w, others("aspire"), others("adaptive")),
    tell,
)
