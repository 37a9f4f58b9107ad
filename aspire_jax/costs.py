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
    """Recursive least squares over runs of steps: each run's summed work and wall time are one equation.

    Coefficients are estimated relative to a prior and stay positive; old runs fade by `forget` per run, so that the
    fit follows a machine that changes. Lives on the host: one update a run.
    """

    def __init__(self, prior: np.ndarray, forget: float = 0.97, trust: float = 0.3) -> None:
        self.prior = prior.astype(np.float64)
        self.forget = forget
        self._gram = np.eye(TERMS) * trust
        self._moment = np.ones(TERMS) * trust
        self._scaled = False

    @property
    def coefficients(self) -> np.ndarray:
        """Current coefficients [4], float32."""
        x = np.linalg.solve(self._gram, self._moment)
        return (self.prior * np.maximum(x, 0.05)).astype(np.float32)

    def update(self, run_work: np.ndarray, seconds: float) -> None:
        """Takes in one run: its work [4] summed over its steps, and its wall time."""
        steps = float(run_work[0])
        if steps <= 0 or seconds <= 0:
            return
        if not self._scaled:  # the first run sets the machine's speed, the prior only the proportions
            self.prior = self.prior * (seconds / float(np.dot(self.prior, run_work)))
            self._scaled = True
        predicted = self.prior * run_work
        # A run of few steps is mostly overhead and noise.
        weight = min(1.0, steps / _FULL_RUN)
        row = predicted / predicted.sum()
        self._gram = self.forget * self._gram + weight * np.outer(row, row)
        self._moment = self.forget * self._moment + weight * row * (seconds / predicted.sum())
        # The prior fades with the rest; keep enough of it to leave no direction undetermined.
        self._gram += np.eye(TERMS) * 1e-3
        self._moment += 1e-3
