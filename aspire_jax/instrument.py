"""Measurements of an instrumented engine, which records traces: recall, and page scores by emitted tokens alone.

Page scores of a verification come from its first and its last query. While recording, the last query is a draft far
ahead that may be rejected, and a run that drafts less would have measured another. So all queries are measured, and
once it is known what the verification emitted, the first and the last that count give the scores: those that a
verification without the rejected drafts would have had.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.context import Scores
from aspire_jax.engine import Engine, State


def recall_of(weights: jax.Array, read: jax.Array, page_size: int) -> jax.Array:
    """Share of each query's attention to committed tokens that lies in the pages its draft read: [B, d_max].

    Mean over query heads; NaN for drafts without a query.

    Args:
      weights: [B, Q, Hkv, G, S] softmax weights of committed tokens; query j stands where draft j was made.
      read: [d_max, B, k] the selection each draft was made with, -1 where unused; [d_max, B, Hkv, k] where each KV
        head has its own.
    """
    most = min(weights.shape[1], read.shape[0])
    weights, chosen = weights[:, :most], read[:most].swapaxes(0, 1)
    pages = weights.reshape(*weights.shape[:-1], -1, page_size).sum(axis=-1)
    total = jnp.sum(pages, axis=-1, keepdims=True)
    share = jnp.mean(pages / jnp.where(total > 0, total, np.float32(1.0)), axis=3)  # [B, Q, Hkv, P]
    if chosen.ndim == 3:
        share, chosen = jnp.mean(share, axis=2, keepdims=True), chosen[:, :, None]
    inside = jnp.take_along_axis(share, jnp.maximum(chosen, 0), axis=3)
    recall = jnp.mean(jnp.sum(jnp.where(chosen >= 0, inside, np.float32(0.0)), axis=3), axis=2)
    return jnp.pad(recall, ((0, 0), (0, read.shape[0] - most)), constant_values=np.float32(np.nan))


def recall(engine: Engine, state: State, weights: jax.Array, set_index: Any) -> jax.Array:
    """Recall [B, d_max] of the drafts' selections by one layer's `weights` of all queries."""
    return recall_of(weights, jnp.take(state.read, set_index, axis=1), engine.page_size)


def read(engine: Engine, state: State, after: State, drafting: jax.Array) -> jax.Array:
    """The selections that the drafts held were made with, those of this step from `state` to `after` among them.

    Where layers are served within the step, the selection of the last of them stands for all.
    """
    used = state.selection
    if engine.plan.same_step:

        def served(context: Any) -> jax.Array:
            return engine.context.select(context, state.slots.length, engine.room)

        used = jax.lax.cond(jnp.any(drafting), served, lambda _: state.selection, after.context)
    place = jnp.arange(engine.d_max, dtype=jnp.int32)[:, None] == state.slots.drafted[None]
    now = (place & drafting[None]).reshape(engine.d_max, 1, -1, *(1,) * (used.ndim - 2))
    return jnp.where(now, used[None], state.read)


def every_query(engine: Engine, scores: Scores | None) -> tuple[jax.Array, jax.Array] | None:
    """A step's scores in the form that all step shapes share: `engine.plan.measured` layers, d_max + 1 queries.

    Args:
      scores: mass [layers, B, ...], of a verification [layers, B, Q, ...].

    Returns:
      mass [layers, B, d_max + 1, ...] and rows [layers, B]; None where no step measures any layer.
    """
    layers = engine.plan.measured
    if not layers:
        return None
    heads = (engine.config.n_kv_heads,) if engine.plan.heads == "kv" else ()
    mass = jnp.zeros((len(layers), engine.batch, engine.d_max + 1, *heads, engine.pages), jnp.float32)
    rows = jnp.zeros((len(layers), engine.batch), bool)
    if scores is not None:
        at = np.array([layers.index(layer) for layer in scores.layers])
        found = scores.mass if scores.mass.ndim == mass.ndim else scores.mass[:, :, None]
        mass = mass.at[at, :, : found.shape[2]].set(found)
        rows = rows.at[at].set(scores.rows)
    return mass, rows


def observe(
    engine: Engine,
    state: State,
    context: Any,
    scores: tuple[jax.Array, jax.Array],
    emitted: jax.Array,
    drafting: jax.Array,
) -> Any:
    """The context policy's state with a step's scores, once it is known how many tokens each row emitted [B]."""
    mass, rows = scores
    if engine.plan.same_step:  # the forward has handed over the drafting rows' scores already
        rows = rows & ~drafting[None]
    found = Scores(engine.plan.measured, mass, rows, state.slots.length)
    return engine.context.observe(context, settled(found, emitted))


def settled(scores: Scores, emitted: jax.Array) -> Scores:
    """An instrumented verification's scores once it is known how many tokens it emitted [B].

    The mean of its first query and of the query of its last emitted token: what the verification would have measured
    had it held no draft but those it accepted. Also the scores of a drafting row, whose only query is the first.
    """
    last = jnp.maximum(emitted - 1, 0).reshape(1, -1, *(1,) * (scores.mass.ndim - 2))
    last = jnp.take_along_axis(scores.mass, last, axis=2)
    return scores._replace(mass=(scores.mass[:, :, 0] + last[:, :, 0]) / np.float32(2.0))
