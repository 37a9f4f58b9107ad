"""How fast a scheduler would be that knows every acceptance: it drafts exactly what will be accepted."""

from __future__ import annotations

import numpy as np

from bench.simulation.replay import Scene


def tokens_per_second(scene: Scene) -> float:
    """Speed of a mixed batch whose rows draft what will be accepted, at most d_max, and nothing that will be rejected.

    Every row pays its share of each step and its own tokens and reads. As the paper's oracle, it does not skip drafts
    that are accepted but would not pay.
    """
    step, token, read, pair = scene.truth.astype(float)
    run, start = scene.traces.run, scene.traces.start.astype(float)
    requests, positions = run.shape
    at = np.zeros(requests, np.int64)
    tokens = seconds = 0.0
    while (going := at < positions).any():
        drafts = run[np.arange(requests), np.minimum(at, positions - 1)].astype(float)
        length = start + at
        chosen = np.minimum(np.maximum(scene.share * length, scene.least), length)
        draft = step / scene.batch + token + (read + pair) * chosen
        verify = step / scene.batch + token * (drafts + 1) + (read + pair * (drafts + 1)) * length
        tokens += float((drafts + 1)[going].sum())
        seconds += float((drafts * draft + verify)[going].sum())
        at = np.where(going, at + drafts.astype(np.int64) + 1, at)
    return tokens / seconds
