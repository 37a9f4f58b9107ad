"""One step in one of its static shapes: the forward, and what it produced in a form that all shapes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import cache as kv
from aspire_jax import instrument, signals
from aspire_jax.draft_length import Signals
from aspire_jax.engine import Engine, Slots, State
from aspire_jax.forward import Batch, Forward, forward, pack
from aspire_jax.params import Params
from aspire_jax.sampling import draw
from aspire_jax.shapes import Shape


class Done(NamedTuple):
    """What a step in one shape produced; the same form for all shapes.

    Attributes:
      k, v: new keys and values, per layer [T_max, Hkv, D].
      page, offset: [T_max] where they go in the cache; out of range for padding and drafts.
      width: scalar, tokens before the padding that makes all shapes alike; 0 where nothing goes into the cache.
      first: [B] index of each row's first token.
      target, margin: [T_max] the greedy token after each packed token, and how far its logit lay above the second best
        (0 in a step of drafts alone).
      packed: what the tokens are drawn from where the engine samples; tokens: scalar, packed tokens before the padding.
      context: the context policy's state, with the step's page scores unless `scores` has them.
      signals, recall: see `Outcome`.
      scores: where the engine is instrumented, mass and rows of `Scores` of all measured layers, every query's apart.
    """

    k: kv.Leaves
    v: kv.Leaves
    page: jax.Array
    offset: jax.Array
    width: jax.Array
    first: jax.Array
    target: jax.Array
    margin: jax.Array
    packed: draw.Packed | None
    tokens: jax.Array
    context: Any
    signals: Signals
    recall: jax.Array | None
    scores: tuple[jax.Array, jax.Array] | None


def in_shape(
    engine: Engine, shape: Shape, params: Params, state: State, drafting: jax.Array, queries: jax.Array
) -> Done:
    """The step in one static shape: all that depends on it, so that the rest is compiled once."""
    batch = pack(engine, state, drafting, queries, shape)
    out = forward(engine, params, state, batch, shape)
    logits = engine.tokenwise(jnp.sum(queries)).unembed(params, out.x)  # [T, V]
    target = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    top = jnp.max(logits, axis=-1)
    page, offset = _destination(engine, state.slots, batch)
    known = signals.unknown(engine.batch)
    if shape.kind != "dense" and engine.d_max and engine.signals:
        known = signals.measure(engine.signals, logits[batch.first], target[batch.first], out.outside, drafting)
    margin = jnp.zeros_like(top)
    if shape.kind != "draft":
        is_top = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == target[:, None]
        margin = top - jnp.max(jnp.where(is_top, -jnp.inf, logits), axis=-1)
    context, recall, scores = out.context, None, None
    if engine.instrumented:
        recall = jnp.full((engine.batch, engine.d_max), np.nan, jnp.float32) if out.recall is None else out.recall
        scores = instrument.every_query(engine, out.scores)
    else:
        context = _observe(engine, batch, out, shape)
    widest = max(s.tokens for s in engine.shapes.all)

    def pad(x: jax.Array, axis: int, fill: int = 0) -> jax.Array:
        around = [(0, 0)] * x.ndim
        around[axis] = (0, widest - shape.tokens)
        return jnp.pad(x, around, constant_values=x.dtype.type(fill))

    k, v = (jax.tree.map(lambda x: pad(x, 0 if engine.unrolled else 1), leaves) for leaves in (out.k, out.v))
    page, offset = pad(page, 0, engine.nowhere), pad(offset, 0)
    width = jnp.int32(0 if shape.kind == "draft" else shape.tokens)
    target, margin = pad(target, 0), pad(margin, 0)
    packed = None
    if engine.sampling is not None:
        place = jnp.where(drafting[batch.row], state.slots.drafted[batch.row], batch.query)
        packed = draw.Packed(*(pad(x, 0) for x in (logits, batch.row, place, batch.valid)))
    tokens = jnp.int32(shape.tokens)
    written = (k, v, page, offset, width, batch.first)
    return Done(*written, target, margin, packed, tokens, context, known, recall, scores)


def no_step(step: Callable[..., Done], *args: Any) -> Done:
    """A step in which no row acts."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, *args))


def _destination(engine: Engine, slots: Slots, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Page and offset [T] of each verified token in the cache; a page out of range for padding and drafts."""
    page = slots.table[batch.row, jnp.minimum(batch.position // engine.page_size, engine.pages - 1)]
    verified = batch.valid & ~batch.drafting[batch.row]
    return jnp.where(verified, page, engine.nowhere), batch.position % engine.page_size


def _observe(engine: Engine, batch: Batch, out: Forward, shape: Shape) -> Any:
    """Hands the step's page scores to the context policy; returns its state."""
    same_step = engine.plan.same_step
    if not engine.d_max or out.scores is None or (shape.kind == "draft" and same_step):
        return out.context
    # Where selections are served within the step, the forward has handed over the drafting rows' scores already.
    rows = out.scores.rows & ~batch.drafting[None] if same_step else out.scores.rows
    return engine.context.observe(out.context, out.scores._replace(rows=rows))
