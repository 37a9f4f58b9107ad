"""A machine that changes under the scheduler: the cost model is fitted while it decodes, as serving does.

The paper's case (arXiv 2609.17943, its table 4): coefficients of one GPU, used on two, took LB[16k-18k] from 2.07 to
1.51 times AutoRegressive until they were fitted anew.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from aspire_jax.costs import Fit
from aspire_jax.draft_length import DraftLengthPolicy
from bench.simulation.replay import Scene, advance, arrays, begin


def follow(
    policy: DraftLengthPolicy,
    scene: Scene,
    machines: Sequence[np.ndarray],
    *,
    mixed: bool,
    shapes: Any,
    fit: Fit | None,
    steps: int = 16,
) -> list[float]:
    """Tokens per second in each of a row of runs of `steps` steps.

    Args:
      scene: its `truth` is not used, and its `believed` only where nothing is fitted.
      machines: the coefficients [4] by which time passes, a run each.
      fit: the cost model's fit, told of every run; None keeps what the scene believes.
    """
    run = jax.jit(functools.partial(advance, policy, mixed, shapes, steps))
    base = arrays(scene, scene.batch)
    carry = begin(policy, base)
    speeds = []
    for truth in machines:
        believed = base.believed if fit is None else fit.coefficients
        before = carry
        carry = run(base._replace(truth=np.asarray(truth, np.float32), believed=believed), carry)
        seconds = float(carry.seconds) - float(before.seconds)
        speeds.append((float(carry.totals[0]) - float(before.totals[0])) / seconds)
        if fit is not None:
            fit.update(np.asarray(carry.work) - np.asarray(before.work), seconds)
    return speeds
