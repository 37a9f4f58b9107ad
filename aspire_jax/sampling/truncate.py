"""Steps 5 to 7 of the contract: which tokens stay. Sets are found by bisection of the threshold, without a sort.

Each filter also says how far its border is from moving: two runs whose logits differ by rounding may put a token on
different sides of it, and the margin of what they sample must tell.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from aspire_jax.sampling.rows import Settings


class Kept(NamedTuple):
    """What the filters leave.

    Attributes:
      logits: [T, V], -inf where dropped.
      inner: [T] a kept token of logit x would be dropped if logits changed by x - inner.
      outer: [T] a dropped token of logit x would be kept if logits changed by outer - x.
    """

    logits: jax.Array
    inner: jax.Array
    outer: jax.Array


def truncated(settings: Settings, logits: jax.Array, row: jax.Array) -> Kept:
    """Top-k, then top-p, then min-p of logits [T, V] that were divided by the temperature. row: [T] slots."""
    sampled = settings.temperature[row] > 0
    best = jnp.max(logits, axis=-1)
    nowhere = jnp.full_like(best, -jnp.inf)
    kept = Kept(logits, nowhere, nowhere)

    k = settings.top_k[row]
    kept = _top(kept, jnp.ones_like(logits), k.astype(jnp.float32), sampled & (k < logits.shape[1]))
    p = settings.top_p[row]
    use_p = sampled & (p < 1)
    kept = jax.lax.cond(jnp.any(use_p), lambda x: _top_p(x, best, p, use_p), lambda x: x, kept)
    least = jnp.where(sampled, best + jnp.log(settings.min_p[row]), -jnp.inf)  # log 0 is -inf: everything stays
    return Kept(
        jnp.where(kept.logits >= least[:, None], kept.logits, -jnp.inf),
        jnp.maximum(kept.inner, least),
        jnp.maximum(kept.outer, least),
    )


def _top(kept: Kept, weights: jax.Array, target: jax.Array, use: jax.Array) -> Kept:
    """The largest logits whose weights together reach `target` [T]; with weights of one, the top k."""

    def keep(kept: Kept) -> Kept:
        lowest, below = threshold(kept.logits, weights, target, use)
        return Kept(
            jnp.where(kept.logits >= lowest[:, None], kept.logits, -jnp.inf),
            jnp.maximum(kept.inner, jnp.where(use, below, -jnp.inf)),
            jnp.maximum(kept.outer, jnp.where(use, lowest, -jnp.inf)),
        )

    return jax.lax.cond(jnp.any(use), keep, lambda x: x, kept)


def _top_p(kept: Kept, best: jax.Array, p: jax.Array, use: jax.Array) -> Kept:
    """The largest logits whose probabilities among those left first reach p [T]."""
    weights = jnp.exp(kept.logits - best[:, None])  # [T, V], 0 where dropped
    total = jnp.sum(weights, axis=-1)
    lowest, below = threshold(kept.logits, weights, p * total, use)
    inside = kept.logits >= lowest[:, None]
    mass = jnp.sum(jnp.where(inside, weights, 0), axis=-1) / total
    without_lowest = jnp.sum(jnp.where(kept.logits > lowest[:, None], weights, 0), axis=-1) / total
    # Logits that change by e change a share s of the mass by no more than 2 e s (1 - s).
    steepness = 2 * p * (1 - p)
    gap = lowest - below
    shrink, grow = (jnp.minimum(jnp.maximum(slack, 0) / steepness, gap) for slack in (p - without_lowest, mass - p))
    return Kept(
        jnp.where(inside, kept.logits, -jnp.inf),
        jnp.maximum(kept.inner, jnp.where(use, lowest - shrink, -jnp.inf)),
        jnp.maximum(kept.outer, jnp.where(use, below + grow, -jnp.inf)),
    )


def threshold(values: jax.Array, weights: jax.Array, target: jax.Array, use: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest value v of each row such that the weights of all values >= v sum to `target` or more.

    Bisection between values that occur: about log2(range / gap at the border) passes, and exact. A sum of float32
    weights rounds; rows compare like with like, since equal sets are summed in the same order.

    Args:
      values: [T, V]; -inf is never kept.
      weights: [T, V], not negative.
      target: [T], more than 0.
      use: [T] bool, rows to look at.

    Returns:
      v [T], -inf in rows not looked at or where all weights together do not reach the target, and the largest value
      below it [T] (-inf where there is none).
    """
    finite = values > -jnp.inf

    def reach(least: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(values >= least[:, None], weights, 0), axis=-1)

    lowest = jnp.min(jnp.where(finite, values, jnp.inf), axis=-1)
    use = use & (reach(lowest) >= target)

    # The threshold is in [low, high], both of which occur, and every value above high is too few.
    def unsure(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = bounds
        return jnp.any(use & (low < high))

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) / 2
        middle = jnp.where(middle > low, middle, high)[:, None]
        above = values >= middle
        enough = jnp.sum(jnp.where(above, weights, 0), axis=-1) >= target
        next_above = jnp.min(jnp.where(above, values, jnp.inf), axis=-1)
        next_below = jnp.max(jnp.where(above, -jnp.inf, values), axis=-1)
        return jnp.where(enough, next_above, low), jnp.where(enough, high, next_below)

    low, _ = jax.lax.while_loop(unsure, halve, (lowest, jnp.max(values, axis=-1)))
    low = jnp.where(use, low, -jnp.inf)
    return low, jnp.max(jnp.where(values < low[:, None], values, -jnp.inf), axis=-1)
