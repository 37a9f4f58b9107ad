"""Acceptance against draft length, with the selection refreshed at every draft step and without (figure 5).

Without, a selection is chosen when a row verifies and stays for all of its drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.studies.runs import Runs
from bench.studies.study import Panel, Result, Study, head, legend, remark

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTHS, QUICK = (1, 3, 5, 10, 16), (1, 5)
# Qwen3-8B on LB[16k-18k]: acceptance at ten drafts; at one, "about 95 %" with either.
PUBLISHED = {"refreshed": {"1": 0.95, "10": 0.766}, "not refreshed": {"1": 0.95, "10": 0.603}}
RENEW = {"refreshed": "step", "not refreshed": "verification"}


def measure(runs: Runs) -> Result:
    """Acceptance of each draft length, either way."""
    rows = []
    for drafts in QUICK if runs.sizes.quick else LENGTHS:
        row: Result = {"drafts": drafts}
        for name, renew in RENEW.items():
            row[name] = runs.accepted(runs.context(renew=renew), drafts)
            runs.say(f"  {drafts} drafts, {name}: {row[name]['all']['rate']:.3f}")
        rows.append(row)
    return {"rows": rows, "paper": PUBLISHED, "paper_setting": "Qwen3-8B, LB[16k-18k]"}


def both(kind: str, title: str) -> Panel:
    """A panel of all verifications, or of those that met new text."""

    def draw(axes: Axes, result: Result) -> None:
        for (name, colour), mark in zip((("refreshed", "#0072B2"), ("not refreshed", "#D55E00")), "os", strict=True):
            rows = [r for r in result["rows"] if r[name][kind]["verifications"]]
            found = [r[name][kind] for r in rows]
            axes.errorbar(
                [r["drafts"] for r in rows], [100 * f["rate"] for f in found],
                [100 * f["standard_error"] for f in found], fmt=f"{mark}-", color=colour, markersize=4, linewidth=1.2,
                capsize=2, label=f"{name} while drafting",
            )  # fmt: skip
            points = {int(k): v for k, v in result["paper"][name].items()}
            axes.plot(
                list(points), [100 * v for v in points.values()], mark, color=colour, markersize=9, fillstyle="none",
                markeredgewidth=1.6, label=f"{name}, paper",
            )  # fmt: skip
        axes.set_ylim(0, 105)
        head(axes, title, "drafts before a verification", "drafts accepted, %")
        legend(axes, 2, "lower left")
        if (made := axes.get_legend()) is not None:
            made.set_bbox_to_anchor((0, 0.08))
        remark(
            axes, f"paper: {result['paper_setting']}, at 1 and 10 drafts; bars: standard error over prompts", 0.03, 0.02
        )

    return draw


def tell(result: Result) -> list[str]:
    lines = ["accepted, all (new text): refreshed; not refreshed; paper's"]
    for row in result["rows"]:
        told = "; ".join(f"{row[n]['all']['rate']:.3f} ({row[n]['novel']['rate']:.3f})" for n in RENEW)
        paper = [result["paper"][n].get(str(row["drafts"])) for n in RENEW]
        there = f"; {paper[0]:.3f}, {paper[1]:.3f}" if None not in paper else ""
        lines.append(f"  {row['drafts']:2d} drafts: {told}{there}")
    return lines


STUDY = Study(
    "draft_length",
    "Longer drafts are accepted less; does refreshing their pages help?",
    "figure 5",
    measure,
    (both("all", "Draft length, all verifications"), both("novel", "Draft length, verifications that met new text")),
    tell,
)
