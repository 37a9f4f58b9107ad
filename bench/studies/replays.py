"""Schedulers on recorded acceptances with the paper's step times: what the studies of schedulers share."""

from __future__ import annotations

from collections.abc import Sequence

from aspire_jax.draft_length import AdaptiveDraftLength, AspireDraftLength, DraftLengthPolicy
from bench.simulation import machine
from bench.simulation.replay import Result as Replayed
from bench.simulation.replay import Scene, replay

# The paper's rule alone, without our guard against losses, and ours; both within the paper's limit.
ASPIRE = AspireDraftLength(in_step=False, regret_share=None)
ADAPTIVE = AdaptiveDraftLength(d_max=ASPIRE.d_max)
POLICIES: dict[str, DraftLengthPolicy] = {"aspire": ASPIRE, "adaptive": ADAPTIVE}


def mixed(policy: DraftLengthPolicy, scenes: Sequence[Scene], steps: int) -> list[Replayed]:
    """Rows on their own ways, on a machine without stairs."""
    return replay(policy, scenes, mixed=True, shapes=machine.ExactShapes(), steps=steps)


def cell(model: str, workload: str) -> str:
    """What pictures call a model on a workload, on two lines."""
    return f"{model.replace('DeepSeek-R1-Distill-', '')}\n{workload}"
