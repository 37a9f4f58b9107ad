"""Accepted length per request and per round: how much requests differ, and a request's own rounds (figures 2a, 2b).

A round drafts as many tokens as the trace knows, verifies, and goes on behind what was accepted, as in the paper's
study, which drafts 20.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np

from aspire_jax.errors import InputError
from aspire_jax.tracing import Trace
from bench.studies.runs import Runs
from bench.studies.study import OURS, PAPER, Result, Study, head, legend, remark

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of 256 LongBench requests, drafting 20: lowest, mean and highest mean accepted length (section 2 of the paper).
PUBLISHED = {"drafts": 20, "requests": 256, "least": 2.56, "mean": 11.51, "most": 20.00}


def rounds(trace: Trace, request: int) -> list[int]:
    """Drafts accepted round by round when a request drafts `d_max` tokens in each."""
    of = np.flatnonzero((trace.request == request) & (trace.drafted == trace.d_max))
    accepted = dict(zip(trace.position[of].tolist(), trace.accepted[of].tolist(), strict=True))
    out: list[int] = []
    at = min(accepted, default=-1)
    while at in accepted:
        out.append(accepted[at])
        at += accepted[at] + 1
    return out


def measure(runs: Runs) -> Result:
    """Rounds of every request of the traces.

    Raises:
      InputError: no request had room for a round.
    """
    found = [(str(t.ids[i]), rounds(t, i)) for t in runs.traces for i in range(len(t.ids))]
    rows: list[Result] = [{"id": name, "rounds": of, "mean": statistics.fmean(of)} for name, of in found if of]
    if not rows:
        raise InputError("traces: no request with a draft of full length, expected answers longer than d_max")
    rows.sort(key=lambda row: row["mean"])
    means = [row["mean"] for row in rows]
    return {
        "drafts": sorted({t.d_max for t in runs.traces}),
        "requests": rows,
        "mean": statistics.fmean(means),
        "least": means[0],
        "most": means[-1],
        # Of one request's rounds about their own mean.
        "deviation_of_rounds": statistics.fmean(statistics.pstdev(row["rounds"]) for row in rows),
        "deviation_of_requests": statistics.pstdev(means),
        "paper": PUBLISHED,
    }


def per_request(axes: Axes, result: Result) -> None:
    """Every request's mean, with the spread of its rounds, beside the paper's lowest, mean and highest."""
    rows = result["requests"]
    share = [100 * (i + 0.5) / len(rows) for i in range(len(rows))]
    means, spread = [row["mean"] for row in rows], [statistics.pstdev(row["rounds"]) for row in rows]
    most = max(*result["drafts"], PUBLISHED["drafts"])
    low = [min(s, m) for s, m in zip(spread, means, strict=True)]
    high = [min(s, most - m) for s, m in zip(spread, means, strict=True)]
    axes.errorbar(
        share, means, [low, high], fmt="o", color=OURS, ecolor="#A9CDE4", markersize=5,
        label="a request here (bar: deviation of its rounds)",
    )  # fmt: skip
    axes.axhline(result["mean"], color=OURS, linewidth=1.2, label=f"mean here, {result['mean']:.1f}")
    axes.axhline(
        PUBLISHED["mean"], color=PAPER, linewidth=1.2, linestyle="--", label="mean in the paper (drafting 20), 11.5"
    )
    axes.plot(
        [0, 100], [PUBLISHED["least"], PUBLISHED["most"]], "D", color=PAPER, markersize=5, clip_on=False,
        label="lowest and highest in the paper",
    )  # fmt: skip
    axes.set_ylim(0, 1.42 * most)
    axes.set_yticks(range(0, most + 1, 4))
    drafts = " or ".join(map(str, result["drafts"]))
    head(
        axes,
        f"Accepted length: requests differ (drafting {drafts})",
        "requests, lowest mean first, %",
        "accepted drafts per round",
    )
    legend(axes, place="upper left")


def per_round(axes: Axes, result: Result) -> None:
    """The rounds of the requests with the lowest, the middle and the highest mean."""
    rows = result["requests"]
    picked = {"lowest": rows[0], "middle": rows[len(rows) // 2], "highest": rows[-1]}
    for (name, row), colour in zip(picked.items(), ("#D55E00", "#009E73", "#0072B2"), strict=True):
        number = range(1, len(row["rounds"]) + 1)
        label = f"{name} request, mean {row['mean']:.1f}"
        axes.plot(number, row["rounds"], "o-", color=colour, markersize=3.5, linewidth=1, label=label)
    most = max(result["drafts"])
    axes.set_ylim(0, 1.42 * most)
    axes.set_yticks(range(0, most + 1, 4))
    head(axes, "Accepted length: so do one request's rounds", "round (a verification)", "accepted drafts")
    legend(axes, place="upper left")
    remark(axes, "paper: figure 2b, curves\nwithout numbers", 0.72, 0.97)


def tell(result: Result) -> list[str]:
    p, drafts = PUBLISHED, " or ".join(map(str, result["drafts"]))
    here = f"{result['mean']:.2f} ({result['least']:.2f} to {result['most']:.2f}, {len(result['requests'])} requests"
    there = f"{p['mean']:.2f} ({p['least']:.2f} to {p['most']:.2f}, {p['requests']} requests"
    of_rounds, of_requests = result["deviation_of_rounds"], result["deviation_of_requests"]
    return [
        f"mean accepted length of a request: {here}, drafting {drafts})",
        f"paper: {there}, drafting {p['drafts']})",
        f"deviation of a request's rounds {of_rounds:.2f}, of the requests' means {of_requests:.2f}",
    ]


STUDY = Study(
    "accepted_length",
    "Accepted length: requests differ, and so do the rounds of one",
    "figures 2a and 2b",
    measure,
    (per_request, per_round),
    tell,
)
