"""What a step costs: linear in four amounts of work, with coefficients that can be set, seeded or fitted online.

The paper's model (arXiv 2609.17943, section 4) has three terms: a constant, packed tokens, context tokens read. It
leaves out the arithmetic of verification, which a GPU hides behind the reads and a CPU does not: that is the fourth.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.config import ModelConfig

TERMS = 4
# Steps from which on a run counts in full.
_FULL_RUN = 8


@flax.struct.dataclass
class CostModel:
    """Seconds of a step = coefficients . work.

    Attributes:
      b: [4] float32: seconds a step (b_model), a packed token (b_mlp), a context token read in every layer
        (b_attn), and a (query, context token) pair (b_pair).
    """

    b: jax.Array

    def seconds(self, work: jax.Array) -> jax.Array:
        """Predicted time of `work` [..., 4]."""
        return jnp.sum(work * self.b.reshape((1,) * (work.ndim - 1) + (TERMS,)), axis=-1)


def work(width: jax.Array, read: jax.Array, pairs: jax.Array) -> jax.Array:
    """The four amounts [..., 4]: one step, its packed tokens, its context tokens read, its query-token pairs."""
    width, read, pairs = (jnp.asarray(x, jnp.float32) for x in (width, read, pairs))
    return jnp.stack(jnp.broadcast_arrays(jnp.ones_like(width), width, read, pairs), axis=-1)


def roofline(config: ModelConfig, itemsize: int, bandwidth: float, flops: float) -> np.ndarray:
    """Coefficients [4] of a machine that reads `bandwidth` bytes and computes `flops` operations a second.

    Only their ratios matter to a scheduler; runs correct them (`Fit`).
    """
    from aspire_jax.params import count

    kv_bytes = 2 * config.n_layers * config.n_kv_heads * config.head_dim * itemsize
    pair_flops = 4 * config.n_layers * config.n_heads * config.head_dim
    return np.array(
        [count(config) * itemsize / bandwidth, 2 * count(config) / flops, kv_bytes / bandwidth, pair_flops / flops],
        np.float32,
    )


class Fit:
    """The cost model of the machine at hand, fitted while it decodes, one run of steps at a time.

    A Kalman filter over the coefficients. They wander: by `drift` of what each contributes to a run's time, and at
    least of a `_FLOOR` share of that time, so that even a term thought negligible can come to count. A run that
    surprises widens what is thought possible, so a machine that changes at once is followed. Lives on the host; an
    update is a few products of 4 x 4.

    Runs of one kind tell nothing but the speed, and must not bend the proportions that a scheduler decides by. So the
    first ones only set the speed; one run far off the others' pace (memory touched for the first time, another program)
    is not believed until the next one is, too; and how noisy runs are is learnt from how far they fall off, so a quiet
    machine's small differences count and a shared one's do not.
    """

    def __init__(self, prior: np.ndarray, drift: float = 0.01) -> None:
        """`prior` [4]: only its proportions matter, the first run sets the speed."""
        self._b = prior.astype(np.float64)
        self._drift = drift
        self._spread: np.ndarray | None = None  # covariance [4, 4]; None before the first run
        self._surprise = 1.0
        self._noise = _NOISY
        self._runs = 0
        self._odd = False

    @property
    def coefficients(self) -> np.ndarray:
        """Current coefficients [4], float32."""
        return self._b.astype(np.float32)

    def update(self, run_work: np.ndarray, seconds: float) -> None:
        """Takes in one run: its work [4] summed over its steps, and its wall time."""
        work = run_work.astype(np.float64)
        steps = float(work[0])
        if steps <= 0 or seconds <= 0:
            return
        pace = seconds / float(self._b @ work)
        self._runs += 1
        if self._runs <= _SETTLING:
            self._b *= pace
            return
        if self._spread is None:
            self._spread = np.diag((_PRIOR * self._reach(work, seconds)) ** 2)
        first, self._odd = not self._odd, not 1 / _ODD < pace < _ODD
        if self._odd and first:
            return
        reach = self._reach(work, seconds)
        spread = self._spread + np.diag((self._drift * reach) ** 2)
        # A run of few steps is mostly overhead and noise.
        noise = (self._noise * seconds) ** 2 * max(1.0, _FULL_RUN / steps)
        error = seconds - float(self._b @ work)
        off = min(abs(error) / seconds, _NOISY)
        self._noise = max(float(np.sqrt(_KEEP * self._noise**2 + (1 - _KEEP) * off**2)), _QUIET)
        expected = float(work @ spread @ work) + noise
        # Errors beyond their expected size, several runs on end, mean that the machine is another one.
        self._surprise = 0.7 * self._surprise + 0.3 * min(error**2 / expected, 100.0)
        if self._surprise > _SURPRISING:
            spread = _capped(spread * self._surprise, _MOST * reach)
            expected = float(work @ spread @ work) + noise
        gain = spread @ work / expected
        self._b = np.maximum(self._b + gain * error, _LEAST * reach)
        self._spread = _capped(spread - np.outer(gain, work @ spread), _MOST * reach)

    def _reach(self, work: np.ndarray, seconds: float) -> np.ndarray:
        """Size [4] of each coefficient as its share of a run's time goes, a term's share being at least `_FLOOR`."""
        used = np.maximum(work, 1e-30)
        return np.maximum(self._b, _FLOOR * seconds / used)


def _capped(spread: np.ndarray, most: np.ndarray) -> np.ndarray:
    """A covariance with standard deviations of `most` at most: what no run tells apart must not grow without end."""
    scale = np.minimum(most / np.sqrt(np.maximum(np.diag(spread), 1e-300)), 1.0)
    return spread * scale[:, None] * scale[None, :]


# Relative: spread of the prior, largest and smallest that a coefficient may become, the share of a run's time that any
# term may reach unasked, and squared errors over their expectation that mean a change.
_PRIOR, _MOST, _LEAST, _FLOOR, _SURPRISING = 0.5, 2.0, 1e-6, 0.02, 4.0
# Noise of a run's time, relative: the least, the most (and the first guess), and how much of the past each run leaves.
_QUIET, _NOISY, _KEEP = 0.02, 0.3, 0.8
# Runs that only set the speed; and the factor off its expected time that makes a run odd.
_SETTLING, _ODD = 2, 1.6
