"""What batch, context, tensor parallelism and card change for Qwen3-8B.

One at a time from 8 requests of 32k tokens on one H200; contexts from one request, and from four on eight cards.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from aspire_jax.draft_length import DraftLengthPolicy
from bench.gpu_models import MODELS
from bench.simulation import cards, machine, paper
from bench.simulation.acceptance import Acceptance
from bench.simulation.replay import Scene, replay

MODEL, CELL = "Qwen3-8B", paper.Cell("Qwen3-8B", "LB-v2[30k-40k]")


@dataclasses.dataclass(frozen=True)
class Case:
    """One deployment."""

    varied: str
    value: str
    batch: int = 8
    context: int = 32_768
    card: str = "H200"
    parallel: int = 1


CASES = (
    *(Case("batch", str(b), batch=b) for b in (1, 2, 4, 8, 16)),
    *(Case("context, 1 request", f"{c // 1024}k", context=c, batch=1) for c in (4096, 16_384, 65_536, 262_144)),
    *(
        Case("context, 4 requests, 8 cards", f"{c // 1024}k", context=c, batch=4, parallel=8)
        for c in (16_384, 131_072, 1_048_576)
    ),
    *(Case("tensor parallelism", str(p), parallel=p) for p in (1, 2, 4, 8)),
    *(Case("card", name, card=name) for name in cards.CARDS),
)


def study(policies: dict[str, DraftLengthPolicy], spread: float, steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Each case's speedup over plain decoding by each policy; acceptances as in the paper's 30k to 40k workload."""
    traces = paper.mixed(CELL, spread, seed).traces
    config, out = MODELS[MODEL], []
    scenes = []
    for case in CASES:
        costs = cards.coefficients(config, cards.CARDS[case.card], case.parallel)
        moved = Acceptance(traces.run, traces.margin, np.full_like(traces.start, case.context))
        scenes.append(Scene(moved, case.batch, costs, costs))
    shapes = machine.ExactShapes(refreshes=1 / config.n_layers)
    found = {name: replay(p, scenes, mixed=True, shapes=shapes, steps=steps) for name, p in policies.items()}
    for i, (case, scene) in enumerate(zip(CASES, scenes, strict=True)):
        step, token, read, pair = scene.truth.astype(float)
        plain = case.batch / (step + case.batch * (token + (read + pair) * case.context))
        row: dict[str, Any] = dataclasses.asdict(case)
        row["fits_in_memory"] = cards.fits(config, cards.CARDS[case.card], case.batch, case.context, case.parallel)
        row["plain_tokens_per_second"] = plain
        row |= {name: results[i].tokens_per_second / plain for name, results in found.items()}
        out.append(row)
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """The study as text."""
    lines = [f"{MODEL} by data sheets: speedup over plain decoding (- does not fit in memory)"]
    for row in rows:
        if row["fits_in_memory"]:
            speeds = ", ".join(f"{name} {row[name]:.2f}" for name in ("aspire", "adaptive"))
            speeds += f" ({row['plain_tokens_per_second']:.0f} tokens/s plain)"
        else:
            speeds = "-"
        lines.append(f"  {row['varied']:20s}{row['value']:>12s}: {speeds}")
    return "\n".join(lines)
