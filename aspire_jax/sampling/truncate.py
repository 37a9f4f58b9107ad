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
    """What the filters leave, and how much the difference of any two logits must change to change that.

    Attributes:
      logits: [T, V], -inf where dropped.
      inner, slack: [T]; a kept token of logit x is dropped by no change less than x - inner, nor less than slack.
      outer: [T], share: [T], reach: [T]; a dropped one is kept by no change less than outer - x, nor less than
        min(share, reach - x).
    """

    logits: jax.Array
    inner: jax.Array
    slack: jax.Array
    outer: jax.Array
    share: jax.Array
    reach: jax.Array


def truncated(settings: Settings, logits: jax.Array, row: jax.Array) -> Kept:
    """Top-k, then top-p, then min-p of logits [T, V] that were divided by the temperature. row: [T] slots."""
    sampled = settings.temperature[row] > 0
    best = jnp.max(logits, axis=-1)
    nowhere, far = jnp.full_like(best, -jnp.inf), jnp.full_like(best, jnp.inf)
    kept = Kept(logits, nowhere, far, nowhere, far, nowhere)

    k = settings.top_k[row]
    use_k = sampled & (k < logits.shape[1])
    kept = jax.lax.cond(jnp.any(use_k), lambda x: _top_k(x, k, use_k), lambda x: x, kept)
    p = settings.top_p[row]
    use_p = sampled & (p < 1)
    kept = jax.lax.cond(jnp.any(use_p), lambda x: _top_p(x, best, p, use_p), lambda x: x, kept)
    least = jnp.where(sampled, best + jnp.log(settings.min_p[row]), -jnp.inf)  # log 0 is -inf: everything stays
    return kept._replace(
        logits=jnp.where(kept.logits >= least[:, None], kept.logits, -jnp.inf),
        inner=jnp.maximum(kept.inner, least),
        outer=jnp.maximum(kept.outer, least),
    )


def _top_k(kept: Kept, k: jax.Array, use: jax.Array) -> Kept:
    """The k [T] largest logits, and those equal to the last of them."""
    lowest, below = threshold(kept.logits, jnp.ones_like(kept.logits), k.astype(jnp.float32), use)
    return kept._replace(
        logits=jnp.where(kept.logits >= lowest[:, None], kept.logits, -jnp.inf),
        inner=jnp.where(use, below, -jnp.inf),
        outer=jnp.where(use, lowest, -jnp.inf),
    )


def _top_p(kept: Kept, best: jax.Array, p: jax.Array, use: jax.Array) -> Kept:
    """The largest logits whose probabilities among those left first reach p [T], and those equal to the last."""
    weights = jnp.exp(kept.logits - best[:, None])  # [T, V], 0 where dropped
    total = jnp.sum(weights, axis=-1)
    lowest, below = threshold(kept.logits, weights, p * total, use)
    inside = kept.logits >= lowest[:, None]

    def odds(of: jax.Array) -> jax.Array:
        """Logarithm of the odds of a share; differences of logits that change by e change it by no more than e."""
        of = jnp.clip(of, 0, 1)
        return jnp.log(of) - jnp.log1p(-of)

    mass = jnp.sum(jnp.where(inside, weights, 0), axis=-1) / total
    without_lowest = jnp.sum(jnp.where(kept.logits > lowest[:, None], weights, 0), axis=-1) / total
    # A kept token falls out if what lies above it comes to weigh p, or if a dropped one overtakes it. A dropped one
    # comes in if what is kept comes to weigh less than p, or if it overtakes one of those.
    return kept._replace(
        logits=jnp.where(inside, kept.logits, -jnp.inf),
        inner=jnp.maximum(kept.inner, jnp.where(use, below, -jnp.inf)),
        slack=jnp.where(use, jnp.maximum(odds(p) - odds(without_lowest), 0), jnp.inf),
        share=jnp.where(use, jnp.maximum(odds(mass) - odds(p), 0), jnp.inf),
        reach=jnp.where(use, lowest, -jnp.inf),
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
