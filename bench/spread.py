"""Means with intervals, and percentiles: how sure a figure is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

# Student's t for 95 % two-sided, by degrees of freedom from 1; beyond the last it is close to the normal 1.96.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Independent values (one a seed), their mean, and half of its 95 % interval by Student's t; None for one value."""
    n = len(values)
    half = None
    if n > 1:
        t = _T[n - 2] if n - 2 < len(_T) else 1.96
        half = t * statistics.stdev(values) / math.sqrt(n)
    return {"mean": statistics.fmean(values), "half": half, "values": list(values)}


def text(figure: dict[str, Any], digits: int = 2) -> str:
    """Mean and half width as they are printed."""
    mean = f"{figure['mean']:.{digits}f}"
    return mean if figure["half"] is None else f"{mean} ± {figure['half']:.{digits}f}"


def percentiles(values: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile of `values`, each counted `weights` times."""
    order = np.argsort(values)
    reached = np.cumsum(np.asarray(weights, float)[order])
    at = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    places = {name: int(np.searchsorted(reached, share * reached[-1])) for name, share in at.items()}
    return {name: float(np.asarray(values)[order][min(place, len(order) - 1)]) for name, place in places.items()}
