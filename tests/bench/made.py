"""Hand-made traces: drafts from every position, of which given numbers are accepted."""

from __future__ import annotations

from typing import Any

import numpy as np

from aspire_jax.tracing import Trace
from aspire_jax.tracing.file import FORMAT


def trace(accepted: np.ndarray, first: int = 1, d_max: int = 4, **meta: Any) -> Trace:
    """Drafts from every position from `first` on; margins are 1 where a draft is accepted, else 0.1."""
    requests, positions = accepted.shape
    margin = np.where(np.arange(d_max) < accepted.reshape(-1, 1), 1.0, 0.1).astype(np.float32)
    n = accepted.size
    position = np.tile(np.arange(first, first + positions), requests).astype(np.int32)
    nan = np.full((n, d_max), np.nan, np.float32)
    known = {
        "format": FORMAT,
        "model": "m",
        "method": "x",
        "context": "c",
        "options": {},
        "d_max": d_max,
        "page_size": 16,
    }
    return Trace(
        meta={**known, "cadence": "every", **meta},
        ids=np.array([str(r) for r in range(requests)]),
        prompt_tokens=np.full(requests, 100, np.int32),
        emitted=np.full(requests, positions + first + 1, np.int32),
        tokens=np.zeros((requests, positions + first + 1), np.int32),
        request=np.repeat(np.arange(requests), positions).astype(np.int32),
        position=position,
        length=99 + position,
        drafted=np.full(n, d_max, np.int32),
        accepted=accepted.reshape(-1).astype(np.int32),
        draft=np.zeros((n, d_max), np.int32),
        top_probability=nan,
        margin=margin,
        entropy=nan,
        outside=nan,
        recall=nan,
    )
