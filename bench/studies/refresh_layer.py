"""Acceptance by the position of the refresh layer, whose pages all layers read while drafting (table 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.simulation import machine
from bench.studies.runs import Runs
from bench.studies.study import OURS, Result, Study, head, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The draft length of the paper's synchronised runs; that of its table 5 is not given.
GAMMA = 5
QUICK = ("0", "N-2")


def positions(layers: int) -> dict[str, int]:
    """The paper's positions in a model of so many layers."""
    n = layers
    return {"0": 0, "N/4": n // 4, "N/2": n // 2, "3N/4": 3 * n // 4, "N-2": max(n - 2, 0), "N-1": n - 1}


def measure(runs: Runs) -> Result:
    """Acceptance at each position."""
    rows, default = [], runs.context()
    layers = runs.model.config.n_layers
    for name, layer in positions(layers).items():
        if runs.sizes.quick and name not in QUICK:
            continue
        # The paper's own position is the policy's default, and one run serves both.
        context = default if name == "N-2" else runs.context(layers=(layer,))
        rows.append({"position": name, "layer": layer, **runs.accepted(context, GAMMA)})
        runs.say(f"  layer {layer} ({name}): {rows[-1]['all']['rate']:.3f}")
    table = machine.tables()["refresh_layer_acceptance_pct"]
    paper = [
        {"model": model, "workload": workload, "acceptance": dict(zip(table["positions"], values, strict=True))}
        for model, workload, *values in table["rows"]
    ]
    return {"drafts": GAMMA, "layers": layers, "rows": rows, "paper": paper}


def acceptance(axes: Axes, result: Result) -> None:
    """This model over the paper's six rows."""
    names = list(result["paper"][0]["acceptance"])
    for row, colour in zip(
        result["paper"], ("#BBBBBB", "#BBBBBB", "#888888", "#888888", "#D8B070", "#D8B070"), strict=True
    ):
        style = "--" if row["workload"] == "AIME" else "-"
        label = f"{row['model'].replace('DeepSeek-R1-Distill-', '')}, {row['workload']} (paper)"
        axes.plot(
            range(len(names)), [row["acceptance"][n] for n in names], style, color=colour, linewidth=1.3, label=label
        )
    for kind, style, label in (("all", "o-", "this model"), ("novel", "o:", "this model, new text")):
        rows = [r for r in result["rows"] if r[kind]["verifications"]]
        axes.errorbar(
            [names.index(r["position"]) for r in rows], [100 * r[kind]["rate"] for r in rows],
            [100 * r[kind]["standard_error"] for r in rows], fmt=style, color=OURS, markersize=5, linewidth=1.8,
            capsize=2, label=label,
        )  # fmt: skip
    at = {r["position"]: r["layer"] for r in result["rows"]}
    axes.set_xticks(range(len(names)), [f"{n}\n(layer {at[n]})" if n in at else n for n in names], fontsize=8)
    axes.set_ylim(0, 100)
    title = f"Position of the refresh layer (drafting {result['drafts']}; N = {result['layers']} here)"
    head(axes, title, "refresh layer, numbered from 0", "drafts accepted, %")
    legend(axes, 2, "lower center")


def tell(result: Result) -> list[str]:
    lines = ["accepted, all (new text), by refresh layer; the paper's range over models and workloads"]
    for row in result["rows"]:
        values = [p["acceptance"][row["position"]] for p in result["paper"]]
        lines.append(
            f"  {row['position']:4s} layer {row['layer']:2d}: {row['all']['rate']:.3f} +- "
            f"{row['all']['standard_error']:.3f} ({row['novel']['rate']:.3f}); paper {min(values):.1f} to "
            f"{max(values):.1f} %"
        )
    return lines


STUDY = Study(
    "refresh_layer",
    "Which layer's pages serve the others best?",
    "table 5",
    measure,
    (acceptance,),
    tell,
)
