"""How likely is a draft to be accepted? Estimates that forget, from the drafts' own confidence and each row's past.

Two questions, two estimates. Of the next draft nothing is known but whose it is: its row's rate, accepted over tried,
both fading sums (a mean of ratios would be biased low), filled up with drafts at the batch's rate, and that with drafts
at a prior's. Of a draft that is held its margin is known too: log-odds of acceptance = its class's + its
row's, both fitted online by Newton steps on what verifications say. What is not observed fades as well, so a row that
stopped drafting comes to be taken for an average one, and a batch that stopped for a new one.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# Upper edges of the classes of a draft's margin (its logit above the second best), the last one open; and one more
# class, for the unmeasured.
EDGES = (0.05, 0.1, 0.2, 0.35, 0.55, 0.8, 1.2, 2.0, 3.5)
# Log-odds of acceptance in each class before anything was seen: about what they are on SmolLM2 (docs/adaptive.md).
PRIOR = (0.2, 0.3, 0.6, 1.2, 1.6, 2.2, 2.7, 3.2, 4.3, 5.5, 2.0)
CLASSES = len(PRIOR)
# Drafts that the level above counts for in a rate.
WEIGHT = 16.0
# Share of a row's past that a verification without drafts leaves.
UNOBSERVED = 0.99
# The batch's sums rest on all rows and fade more slowly than a row's by this factor.
SLOWER = 4.0
# Fisher information of the priors: that a class is as above, and that a row is like the others.
CLASS_PRIOR, ROW_PRIOR = 2.0, 1.5
# Bounds of log-odds, so that no estimate runs away from further evidence.
MOST = 6.0


@flax.struct.dataclass
class Likelihood:
    """Fading sums and fitted log-odds.

    Attributes:
      accepted, tried: [B] each row's own drafts; one behind a rejection was not tried.
      all_accepted, all_tried: scalars, the batch's.
      of_class: [CLASSES] log-odds; class_weight: [CLASSES] Fisher information that they rest on.
      of_row: [B] log-odds that a row adds; row_weight: [B] as above.
    """

    accepted: jax.Array
    tried: jax.Array
    all_accepted: jax.Array
    all_tried: jax.Array
    of_class: jax.Array
    class_weight: jax.Array
    of_row: jax.Array
    row_weight: jax.Array


def unknown(batch: int) -> Likelihood:
    """Nothing was tried yet."""
    rows, classes, zero = jnp.zeros((batch,)), jnp.zeros((CLASSES,)), jnp.zeros(())
    return Likelihood(rows, rows, zero, zero, jnp.asarray(PRIOR, jnp.float32), classes, rows, rows)


def class_of(margin: jax.Array) -> jax.Array:
    """Class of a draft's margin (NaN: not measured), int32 of the same shape."""
    edges = np.asarray(EDGES, np.float32).reshape((-1,) + (1,) * margin.ndim)
    kind = jnp.sum(margin[None] > edges, axis=0)
    return jnp.where(jnp.isnan(margin), CLASSES - 1, kind).astype(jnp.int32)


def rate(of: Likelihood, prior: float) -> jax.Array:
    """[B] probability that a row's next draft is accepted; `prior`: that of a batch of which nothing is known."""
    w = np.float32(WEIGHT)
    batch = (of.all_accepted + np.float32(prior) * w) / (of.all_tried + w)
    return jnp.clip((of.accepted + w * batch) / (of.tried + w), 0.01, 0.99)


def held(of: Likelihood, kind: jax.Array) -> jax.Array:
    """[B, d] probability that held drafts of classes `kind` [B, d] are accepted, each given that those before are."""
    return jax.nn.sigmoid(of.of_class[kind] + of.of_row[:, None])


def learned(
    of: Likelihood, kind: jax.Array, verified: jax.Array, drafts: jax.Array, accepted: jax.Array, keep: float
) -> Likelihood:
    """The estimates after a step.

    Args:
      kind: [B, d_max] classes of the drafts held.
      verified: [B] bool; drafts, accepted: [B] drafts that were verified and accepted, 0 where none were.
      keep: share of a row's past that a verification of drafts leaves.
    """
    place = jnp.arange(kind.shape[1], dtype=jnp.int32)[None]
    tried = (place < drafts[:, None]) & (place <= accepted[:, None])
    hit = tried & (place < accepted[:, None])
    n_tried, n_hit = (jnp.sum(x, axis=1).astype(jnp.float32) for x in (tried, hit))
    fade = jnp.where(drafts > 0, np.float32(keep), jnp.where(verified, np.float32(UNOBSERVED), np.float32(1.0)))
    fade_all = jnp.mean(1 - (1 - fade) / np.float32(SLOWER))

    p = held(of, kind)
    surprise = jnp.where(tried, hit.astype(jnp.float32) - p, 0.0)
    information = jnp.where(tried, p * (1 - p), 0.0)
    row_weight = fade * of.row_weight + jnp.sum(information, axis=1)
    prior_pull = (1 - fade) * np.float32(ROW_PRIOR) * of.of_row
    of_row = of.of_row + (jnp.sum(surprise, axis=1) - prior_pull) / (row_weight + np.float32(ROW_PRIOR))
    one_hot = jax.nn.one_hot(kind, CLASSES, dtype=jnp.float32)
    class_weight = fade_all * of.class_weight + jnp.einsum("bd,bdc->c", information, one_hot)
    step = jnp.einsum("bd,bdc->c", surprise, one_hot) / (class_weight + np.float32(CLASS_PRIOR))
    return Likelihood(
        accepted=fade * of.accepted + n_hit,
        tried=fade * of.tried + n_tried,
        all_accepted=fade_all * of.all_accepted + jnp.sum(n_hit),
        all_tried=fade_all * of.all_tried + jnp.sum(n_tried),
        of_class=jnp.clip(of.of_class + step, -MOST, MOST),
        class_weight=class_weight,
        of_row=jnp.clip(of_row, -MOST, MOST),
        row_weight=row_weight,
    )


def forgotten(of: Likelihood, rows: jax.Array) -> Likelihood:
    """The estimates without those of `rows` [B] bool."""
    names = ("accepted", "tried", "of_row", "row_weight")
    return dataclasses.replace(of, **{name: jnp.where(rows, np.float32(0.0), getattr(of, name)) for name in names})
