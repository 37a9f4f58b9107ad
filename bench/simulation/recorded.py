"""Recorded traces (see `aspire_jax.tracing`) as what the simulator replays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aspire_jax.errors import InputError
from aspire_jax.tracing import Trace
from bench.simulation.acceptance import Acceptance


def acceptance(traces: Sequence[Trace]) -> Acceptance:
    """The requests of all traces together, cut to the positions that every one of them has drafts of full length for.

    Raises:
      InputError: a trace in which not every position was drafted from, traces of different d_max, or too short.
    """
    d_max = traces[0].meta["d_max"]
    rows = []
    for trace in traces:
        if trace.meta["cadence"] != "every":
            raise InputError(f"trace: cadence {trace.meta['cadence']!r}, expected 'every': drafts from each position")
        if trace.meta["d_max"] != d_max:
            raise InputError(f"trace: d_max {trace.meta['d_max']}, expected {d_max} as in the first")
        for request in range(len(trace.ids)):
            of = np.flatnonzero((trace.request == request) & (trace.drafted == d_max))
            # Positions follow each other: keep the run from the first one on.
            steps = np.diff(trace.position[of])
            rows.append((trace, of[: int(np.argmax(steps != 1)) + 1] if (steps != 1).any() else of))
    positions = min(len(of) for _, of in rows)
    if positions < 2 * d_max:
        raise InputError(f"trace: {positions} positions in the shortest request, expected at least {2 * d_max}")
    run = np.stack([trace.accepted[of[:positions]] for trace, of in rows])
    margin = np.stack([trace.margin[of[:positions]] for trace, of in rows])
    start = np.asarray([trace.length[of[0]] for trace, of in rows], np.int32)
    return Acceptance(run.astype(np.int32), margin.astype(np.float32), start)
