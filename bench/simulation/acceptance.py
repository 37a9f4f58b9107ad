"""What the simulator replays: for every position of every request, how many drafts from there would be accepted.

Recorded traces say it exactly. Where none exist, `Generator` draws them with what the paper reports of real ones:
requests that differ, and within a request easy and hard spans (ASPIRE, arXiv 2609.17943, section 2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Correlation length of easy and hard spans, in tokens.
SPAN = 24.0
# Margins of rejected and of accepted drafts are log-normal, with these medians; unit spread of the logarithm makes
# their distance an area under the ROC curve of 0.93, as measured on SmolLM2 (docs/adaptive.md).
REJECTED, ACCEPTED = 0.3, 2.4


class Acceptance(NamedTuple):
    """Acceptances by position.

    Attributes:
      run: [R, P] int32, drafts accepted of those made from a position, when drafting without end (at most d_max).
      margin: [R, P, d_max] float32, how far each of those drafts' logit lay above the second best.
      start: [R] int32, committed tokens at position 0.
    """

    run: np.ndarray
    margin: np.ndarray
    start: np.ndarray

    @property
    def d_max(self) -> int:
        """Longest draft that the traces know."""
        return self.margin.shape[2]


def tokens_per_verification(run: np.ndarray, gamma: int) -> float:
    """What drafting `gamma` tokens from wherever the last verification ended yields, mean over all verifications."""
    requests, positions = run.shape
    at, verifications = np.zeros(requests, np.int64), 0
    emitted = 0
    while True:
        going = at < positions
        if not going.any():
            return emitted / verifications
        step = np.minimum(run[np.arange(requests), np.minimum(at, positions - 1)], gamma) + 1
        at = np.where(going, at + step, at)
        emitted += int(step[going].sum())
        verifications += int(going.sum())


class Generator:
    """Draws acceptances; the same noise for every mean, so that the mean can be fitted by bisection.

    Log-odds of acceptance at a token = mean + what is the request's own + an AR(1) process along the tokens.
    """

    def __init__(
        self, requests: int, positions: int, d_max: int, *, of_request: float, of_span: float, seed: int = 0
    ) -> None:
        """Standard deviations of log-odds: `of_request` between requests, `of_span` along one."""
        rng = np.random.default_rng(seed)
        total = positions + d_max
        noise = rng.standard_normal((requests, total))
        keep = np.exp(-1.0 / SPAN)
        span = np.empty_like(noise)
        span[:, 0] = noise[:, 0]
        for t in range(1, total):
            span[:, t] = keep * span[:, t - 1] + np.sqrt(1 - keep**2) * noise[:, t]
        self.offset = of_request * rng.standard_normal((requests, 1)) + of_span * span
        self.uniform = rng.random((requests, total))
        self.confidence = rng.standard_normal((requests, total))
        self.positions, self.d_max = positions, d_max

    def run(self, mean: float) -> np.ndarray:
        """[R, P]: the distance to the next token whose draft is rejected, at most d_max."""
        accepted = self._accepted(mean)
        distance = np.empty(accepted.shape, np.int32)
        following = np.full(accepted.shape[0], self.d_max, np.int32)
        for t in reversed(range(accepted.shape[1])):
            following = np.where(accepted[:, t], np.minimum(following + 1, self.d_max), 0)
            distance[:, t] = following
        return distance[:, : self.positions]

    def fitted(self, gamma: int, target: float) -> float:
        """The mean log-odds at which drafting `gamma` tokens yields `target` tokens per verification."""
        low, high = -8.0, 14.0
        for _ in range(24):
            middle = (low + high) / 2
            if tokens_per_verification(self.run(middle), gamma) < target:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def acceptance(self, mean: float, start: np.ndarray) -> Acceptance:
        """The traces at `mean`, beginning at `start` [R] committed tokens."""
        margin = np.where(self._accepted(mean), ACCEPTED, REJECTED) * np.exp(self.confidence)
        windows = np.lib.stride_tricks.sliding_window_view(margin, self.d_max, axis=1)[:, : self.positions]
        return Acceptance(self.run(mean), np.ascontiguousarray(windows, np.float32), start.astype(np.int32))

    def _accepted(self, mean: float) -> np.ndarray:
        return self.uniform < 1 / (1 + np.exp(-(mean + self.offset)))
