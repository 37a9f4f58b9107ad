"""Admission: a prompt's keys and values go into a slot's pages, chunk by chunk, before its first step.

All of the prompt but its last token is prefilled. The last one becomes the slot's pending token, so that the request's
first step is an ordinary verification: it yields the first token and, with it, the scores the first selection needs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import cache as kv
from aspire_jax import model
from aspire_jax.attention import pallas, xla
from aspire_jax.attention.softmax import merge, normalise
from aspire_jax.engine import RUNNING, Engine, State
from aspire_jax.params import Params
from aspire_jax.sampling import rows as sampling_rows
from aspire_jax.sampling.rows import Settings

# Keys a chunk's queries meet at a time: with several hundred queries a small block keeps the scores in the CPU's cache.
_BLOCK = 512


def prefill(
    engine: Engine, params: Params, state: State, slot: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array
) -> State:
    """Writes the keys and values of one chunk of a prompt.

    Args:
      slot: scalar int32.
      tokens: [chunk] int32, padded behind `count`.
      start: position of the chunk's first token; the positions before it must have been prefilled.
      count: tokens of the chunk that count, scalar int32.
    """
    c, chunk = engine.config, tokens.shape[0]
    place = jnp.arange(chunk, dtype=jnp.int32)
    position = start + place
    arithmetic = engine.tokenwise(count, chunk)
    rotation = arithmetic.rotation(position)
    seen = place[:, None] >= place[None, :]
    tiles = xla.Tiles(
        row=slot[None], first=jnp.zeros((1,), jnp.int32), keys=start[None], of_row=jnp.zeros((1,), jnp.int32)
    )
    block = min(engine.capacity, _BLOCK // engine.page_size * engine.page_size)
    if engine.reproducible:
        block = engine.block
    table = state.slots.table

    def one(x: jax.Array, layer: int | jax.Array) -> tuple[jax.Array, Any]:
        weights = model.layer_of(params, layer)
        q, k, v = arithmetic.project(weights, x, rotation)
        if engine.implementation == "pallas":
            attended = pallas.chunk_attention(engine, state, q, k, v, layer, slot, start, count)
            return arithmetic.finish(weights, x, attended), (k, v)
        old_k, old_v = kv.leaf(state.cache.k, layer), kv.leaf(state.cache.v, layer)
        before, _, old_k, old_v = xla.over_tiles(q[None], old_k, old_v, table, tiles, block, engine.consecutive)
        before = type(before)(*(y[0] for y in before))
        attended = arithmetic.across(
            lambda old, q, k, v: normalise(merge(old, xla.over_new(q, k, v, seen))), before, q, k, v
        )
        return arithmetic.finish(weights, x, attended), (k, v, *((old_k, old_v) if engine.unrolled else ()))

    x = params["embed"][tokens]
    old = state.cache
    if engine.unrolled:
        per_layer = []
        for layer in range(c.n_layers):
            x, made = one(x, layer)
            per_layer.append(made)
        ks, vs, *pages = zip(*per_layer, strict=True)
        old = kv.KVCache(*pages)
    else:
        _, (ks, vs) = model.through_layers(one, x, 0, c.n_layers)
    page = table[slot, jnp.minimum(position // engine.page_size, engine.pages - 1)]
    page = jnp.where(place < count, page, engine.nowhere)
    offset = position % engine.page_size
    if engine.implementation == "pallas":
        cache = kv.KVCache(*pallas.write(engine, old.k, old.v, (ks, vs), page, offset))
    else:
        cache = kv.KVCache(k=kv.write(old.k, ks, page, offset), v=kv.write(old.v, vs, page, offset))
    return dataclasses.replace(state, cache=cache)


def admit(
    engine: Engine,
    state: State,
    slot: jax.Array,
    length: jax.Array,
    pending: jax.Array,
    max_new: jax.Array,
    stop: jax.Array,
    settings: Settings | None = None,
) -> State:
    """Starts a request in a slot whose pages hold its prompt but for the last token.

    Args:
      slot: scalar int32.
      length: prefilled tokens.
      pending: the prompt's last token.
      max_new: tokens it may emit, 1 to `engine.max_new`.
      stop: [max_stop] stop tokens, -1 where unused.
      settings: how it is sampled, where the engine serves that; greedy decoding where None.
    """
    s = state.slots
    row = jnp.arange(engine.batch) == slot

    def put(old: jax.Array, new: jax.Array | int | bool) -> jax.Array:
        return jnp.where(row, jnp.asarray(new, old.dtype), old)

    slots = dataclasses.replace(
        s,
        length=put(s.length, length),
        pending=put(s.pending, pending),
        drafted=put(s.drafted, 0),
        fresh=put(s.fresh, True),
        stale=put(s.stale, True),
        active=put(s.active, True),
        reason=put(s.reason, RUNNING),
        emitted=put(s.emitted, 0),
        max_new=put(s.max_new, max_new),
        stop=jnp.where(row[:, None], stop[None], s.stop),
        steps=put(s.steps, 0),
        drafted_total=put(s.drafted_total, 0),
        accepted_total=put(s.accepted_total, 0),
        verifications=put(s.verifications, 0),
    )
    sampling = state.sampling
    if engine.sampling is not None and sampling is not None:
        asked = sampling_rows.greedy(engine.sampling, engine.config.vocab_size) if settings is None else settings
        sampling = sampling_rows.admit(sampling, row, asked)
    return dataclasses.replace(
        state,
        slots=slots,
        sampling=sampling,
        selection=jnp.where(row.reshape(1, -1, *(1,) * (state.selection.ndim - 2)), -1, state.selection),
        context=engine.context.forget(state.context, row),
        draft_length=engine.draft_length.forget(state.draft_length, row),
    )


def chunks(tokens: np.ndarray, size: int) -> list[tuple[np.ndarray, int, int]]:
    """Cuts `tokens` into (padded chunk, start, count)."""
    out = []
    for start in range(0, len(tokens), size):
        part = np.asarray(tokens[start : start + size], np.int32)
        out.append((np.pad(part, (0, size - len(part))), start, len(part)))
    return out
