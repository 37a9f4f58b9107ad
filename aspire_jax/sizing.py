"""Which engine a batch of requests needs, and what its steps may cost before any was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from aspire_jax import costs, methods
from aspire_jax.engine import Engine
from aspire_jax.loading import Model
from aspire_jax.request import Prepared
from aspire_jax.sampling.params import support_for
from aspire_jax.sampling.rows import ACCEPTANCES, Acceptance

# Bytes and operations a second that seed the cost model. Only their ratio matters; measured runs correct it.
_MACHINES = {"cpu": (2e10, 1e11), "gpu": (3e12, 5e14), "tpu": (1e12, 2e14)}


def engine_for(
    model: Model,
    requests: Sequence[Prepared],
    *,
    method: str | methods.Method = "aspire",
    slots: int = 8,
    options: Mapping[str, Any] | None = None,
    implementation: str | None = None,
    reproducible: bool = False,
    acceptance: Acceptance = "coupled",
) -> Engine:
    """The smallest engine that serves `requests`; sizes are rounded up, so that similar requests share its programs."""
    if int(slots) != slots or slots < 1:
        raise ValueError(f"slots: {slots!r}, expected a whole number of at least 1")
    if acceptance not in ACCEPTANCES:
        raise ValueError(f"acceptance: {acceptance!r}, expected one of {', '.join(ACCEPTANCES)}")
    longest = max(len(r.tokens) + r.max_new for r in requests)
    stops = max(len(r.stop_ids) for r in requests)
    engine = methods.configure(
        model.config,
        method,
        batch=min(slots, len(requests)),
        capacity=min(_rounded(longest, _grain(longest)), model.config.max_length),
        max_new=1 << (max(64, *(r.max_new for r in requests)) - 1).bit_length(),
        options=options,
        max_stop=_rounded(max(1, stops), 8),
        dtype=model.dtype,
        implementation=implementation,
        platform=_platform(model),
        unrolled=isinstance(model.params["layers"], list),
        reproducible=reproducible,
        sampling=support_for((r.sampling for r in requests), acceptance),
    )
    _ = engine.plan  # refuses a policy that does not fit the model, before anything is compiled
    return engine


def machine_prior(model: Model) -> np.ndarray:
    """Coefficients [4] of the cost model before anything was measured."""
    platform = _platform(model)
    bandwidth, flops = _MACHINES.get(platform, _MACHINES["gpu"])
    return costs.roofline(model.config, np.dtype(jax.tree.leaves(model.params)[0].dtype).itemsize, bandwidth, flops)


def _platform(model: Model) -> str:
    return next(iter(jax.tree.leaves(model.params)[0].devices())).platform


def _grain(tokens: int) -> int:
    """What a capacity of about `tokens` is rounded up to: steps may read all of it, so at most 1/32 is added."""
    return max(64, 1 << max(0, (tokens // 32).bit_length() - 1))


def _rounded(value: int, to: int) -> int:
    return -(-value // to) * to
