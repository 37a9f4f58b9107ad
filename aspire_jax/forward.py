"""The mixed forward: drafting and verifying rows side by side through the same layers.

Reads the cache as the last step left it and treats this step's keys and values as a further part of the softmax; they
are written once, by the caller, after the last layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import cache as kv
from aspire_jax import model
from aspire_jax.attention.interface import Attention
from aspire_jax.attention.mixed import ReproducibleAttention, XlaAttention
from aspire_jax.attention.pallas import PallasAttention
from aspire_jax.attention.softmax import normalise
from aspire_jax.context import Scores
from aspire_jax.engine import Engine, State
from aspire_jax.params import Params
from aspire_jax.shapes import Shape


class Batch(NamedTuple):
    """The step's tokens, packed.

    Attributes:
      drafting: [B] bool; queries: [B] query tokens of each row, 0 where idle.
      row, query: [T] each token's row, and its number among the row's query tokens.
      first: [B] packed index of a row's first token.
      valid: [T] bool, false for padding.
      token, position: [T].
    """

    drafting: jax.Array
    queries: jax.Array
    row: jax.Array
    query: jax.Array
    first: jax.Array
    valid: jax.Array
    token: jax.Array
    position: jax.Array


class Forward(NamedTuple):
    """What the layers produced.

    Attributes:
      x: [T, d_model] residual stream after the last layer.
      k, v: the tokens' keys and values, per layer [T, Hkv, D] (stacked where layers are scanned).
      scores: page scores at the plan's layers, or None where the plan measures none in such a step. Of an instrumented
        verification those of all its queries apart, on an axis behind B (see `instrument`).
      outside: [B] for drafting rows, see `Signals`; None where the policy does not ask or no layer measures it.
      recall: [B, d_max], see `Outcome`; None unless this is an instrumented verification.
      context: the context policy's state (changed where selections are served within the step).
    """

    x: jax.Array
    k: kv.Leaves
    v: kv.Leaves
    scores: Scores | None
    outside: jax.Array | None
    recall: jax.Array | None
    context: Any


def pack(engine: Engine, state: State, drafting: jax.Array, queries: jax.Array, shape: Shape) -> Batch:
    """Lays the rows' query tokens side by side: a draft's last token, a verification's pending token and drafts."""
    s, b = state.slots, engine.batch
    if shape.kind == "packed":
        ends = jnp.cumsum(queries)
        index = jnp.arange(shape.tokens, dtype=jnp.int32)
        row = jnp.sum(index[:, None] >= ends[None, :], axis=1).astype(jnp.int32)
        valid, row = row < b, jnp.minimum(row, b - 1)
        first = (ends - queries).astype(jnp.int32)
        query = jnp.where(valid, index - first[row], 0)
    else:
        row = jnp.repeat(jnp.arange(b, dtype=jnp.int32), shape.queries, total_repeat_length=shape.tokens)
        first = jnp.arange(b, dtype=jnp.int32) * shape.queries
        query = jnp.arange(shape.tokens, dtype=jnp.int32) - first[row]
        valid = query < queries[row]
    tokens = jnp.concatenate([s.pending[:, None], s.drafts], axis=1)  # [B, d_max + 1]
    place = jnp.where(drafting[row], s.drafted[row], jnp.minimum(query, engine.d_max))
    return Batch(drafting, queries, row, query, first, valid, tokens[row, place], s.length[row] + place)


# How attention is computed.
_ATTENTION: dict[str, type[Attention]] = {
    "xla": XlaAttention,
    "pallas": PallasAttention,
    "reproducible": ReproducibleAttention,
}


def forward(engine: Engine, params: Params, state: State, batch: Batch, shape: Shape) -> Forward:
    """Runs the packed tokens through all layers."""
    c, plan = engine.config, engine.plan
    how = "reproducible" if engine.reproducible else engine.implementation
    attention = _ATTENTION[how](engine, state, batch, shape)
    instrumented = engine.instrumented and shape.kind != "draft"
    acting = batch.queries > 0
    drafts, verifies = acting & batch.drafting, acting & ~batch.drafting
    measured: set[int] = set()
    if shape.kind != "dense":
        measured |= set(plan.refresh_layers)
    if shape.kind != "draft" and engine.d_max:
        measured |= set(plan.verify_layers)
    refreshing = plan.refresh_layers if shape.kind != "dense" and engine.d_max else ()
    tokens = engine.tokenwise(jnp.sum(batch.queries))
    rotation = tokens.rotation(batch.position)
    x = params["embed"][batch.token]
    ks, vs, outside, recalls = [], [], [], []
    masses: list[jax.Array] = []  # of the measured layers, in order
    context, served = state.context, None
    for start, stop in segments(c.n_layers, measured, set(refreshing), engine.unrolled):
        if stop - start > 1 and not engine.unrolled:
            x, (k, v, mass), recall = _scanned(
                engine, params, attention, tokens, x, rotation, start, stop, served, start in measured
            )
            recalls.append(recall)
            ks.append(k)
            vs.append(v)
            masses += [] if mass is None else [mass]
            continue
        for layer in range(start, stop):
            weights = model.layer_of(params, layer)
            q, k, v = tokens.project(weights, x, rotation)
            part = attention.attend(q, k, v, _index(engine, layer), plan.sets[layer], layer in refreshing, served)
            if layer in measured:
                asks = layer in refreshing and "outside" in engine.signals
                current = (state.selection if served is None else served)[plan.sets[layer]] if asks else None
                found, beyond = attention.measure(q, part, _index(engine, layer), current)
                masses.append(found[None])
                outside += [] if beyond is None else [beyond]
            recalls.append(attention.recall(q, part, _index(engine, layer), plan.sets[layer]))
            if layer in refreshing and plan.same_step:
                mass = masses[-1][:, :, 0] if instrumented else masses[-1]
                scores = Scores((layer,), mass, drafts[None], state.slots.length)
                context = engine.context.observe(context, scores)
                served = engine.context.select(context, state.slots.length, engine.room)
            x = tokens.finish(weights, x, normalise(part))
            ks.append(k if engine.unrolled else k[None])
            vs.append(v if engine.unrolled else v[None])
    measurement: Scores | None = None
    if masses:
        layers = tuple(sorted(measured))
        none = jnp.zeros_like(acting)
        rows = [(verifies if i in plan.verify_layers else none) | (drafts if i in refreshing else none) for i in layers]
        measurement = Scores(layers, jnp.concatenate(masses), jnp.stack(rows), state.slots.length)
    join: Callable[[list[Any]], Any] = tuple if engine.unrolled else (lambda parts: jnp.concatenate(parts))
    missed = sum(outside[1:], start=outside[0]) / np.float32(len(outside)) if outside else None
    known = [r for r in recalls if r is not None]
    recall = sum(known[1:], start=known[0]) / np.float32(c.n_layers) if known else None
    return Forward(x, join(ks), join(vs), measurement, missed, recall, context)


def segments(n_layers: int, measured: set[int], alone: set[int], unrolled: bool) -> list[tuple[int, int]]:
    """Runs of layers [start, stop) that do the same: all of them measured or none, those of `alone` by themselves."""
    if unrolled:
        return [(0, n_layers)]
    cuts = {0, n_layers} | {i for s in alone for i in (s, s + 1)}
    cuts |= {i for i in range(1, n_layers) if (i in measured) != (i - 1 in measured)}
    return list(itertools.pairwise(sorted(cuts)))


def _index(engine: Engine, layer: int) -> int | jax.Array:
    return layer if engine.unrolled else jnp.int32(layer)


def _scanned(
    engine: Engine,
    params: Params,
    attention: Attention,
    tokens: model.Tokenwise,
    x: jax.Array,
    rotation: jax.Array,
    start: int,
    stop: int,
    served: Any,
    measured: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None], jax.Array | None]:
    """Layers [start, stop) as one loop; x, their k, v and page scores (None unless `measured`), and summed recall."""
    sets = jnp.asarray(np.asarray(engine.plan.sets, np.int32))

    def one(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, Any]:
        weights = model.layer_of(params, layer)
        q, k, v = tokens.project(weights, x, rotation)
        part = attention.attend(q, k, v, layer, sets[layer], False, served)
        mass = attention.measure(q, part, layer, None)[0] if measured else None
        recall = attention.recall(q, part, layer, sets[layer])
        return tokens.finish(weights, x, normalise(part)), (k, v, mass, recall)

    x, (k, v, mass, recall) = model.through_layers(one, x, start, stop)
    return x, (k, v, mass), None if recall is None else jnp.sum(recall, axis=0)
