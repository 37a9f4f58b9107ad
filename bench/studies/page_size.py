"""Acceptance by page size, at one budget in tokens.

The paper also has tokens per second by page size, on its GPU; here nothing is timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.simulation import machine
from bench.studies.runs import Runs
from bench.studies.study import OURS, PAPER, Result, Study, head, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GAMMA = 5
QUICK = (4, 16)


def measure(runs: Runs) -> Result:
    """Acceptance with each page size."""
    table = machine.tables()["page_size_sweep_qwen3_8b_lb16"]
    rows = []
    for size in QUICK if runs.sizes.quick else table["page_size"]:
        rows.append({"page_size": size, **runs.accepted(runs.context(size), GAMMA, size)})
        runs.say(f"  pages of {size}: {rows[-1]['all']['rate']:.3f}")
    paper = [
        {"page_size": size, "acceptance": acceptance / 100, "tokens_per_second": speed}
        for size, speed, acceptance in zip(*(table[k] for k in ("page_size", "tok_s", "acceptance_pct")), strict=True)
    ]
    return {
        "drafts": GAMMA,
        "budget": runs.sizes.budget,
        "rows": rows,
        "paper": paper,
        "paper_setting": "Qwen3-8B, LB[16k-18k]",
    }


def acceptance(axes: Axes, result: Result) -> None:
    """This model and the paper's."""
    for kind, style, label in (("all", "o-", "here"), ("novel", "o:", "here, new text")):
        rows = [r for r in result["rows"] if r[kind]["verifications"]]
        axes.errorbar(
            [r["page_size"] for r in rows], [100 * r[kind]["rate"] for r in rows],
            [100 * r[kind]["standard_error"] for r in rows], fmt=style, color=OURS, markersize=5, linewidth=1.5,
            capsize=2, label=label,
        )  # fmt: skip
    sizes = [p["page_size"] for p in result["paper"]]
    axes.plot(
        sizes, [100 * p["acceptance"] for p in result["paper"]], "D--", color=PAPER, markersize=5, linewidth=1.2,
        label=f"paper, {result['paper_setting']}",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(s) for s in sizes])
    axes.set_ylim(0, 100)
    title = f"Page size (reading {result['budget']} tokens, drafting {result['drafts']})"
    head(axes, title, "tokens a page", "drafts accepted, %")
    legend(axes, 1, "lower left")


def tell(result: Result) -> list[str]:
    paper = {p["page_size"]: p["acceptance"] for p in result["paper"]}
    return ["accepted, all (new text), by page size; paper's"] + [
        f"  {r['page_size']:2d} tokens: {r['all']['rate']:.3f} +- {r['all']['standard_error']:.3f} "
        f"({r['novel']['rate']:.3f}); paper {paper[r['page_size']]:.3f}"
        for r in result["rows"]
    ]


STUDY = Study(
    "page_size",
    "Does the size of a page matter to acceptance?",
    "sweep of page sizes",
    measure,
    (acceptance,),
    tell,
)
