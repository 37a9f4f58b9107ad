"""What a step leaves behind, and finds: keys and values in cache and tail; selections, and copies of their pages."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from aspire_jax import cache as kv
from aspire_jax import reproducible
from aspire_jax.attention import pallas
from aspire_jax.engine import Engine, Slots, State
from aspire_jax.shaped import Done


def write(engine: Engine, state: State, done: Done, drafting: jax.Array) -> State:
    """Verified tokens' keys and values go into the cache, a drafted token's into its row's tail."""
    if engine.implementation == "pallas":
        new = (done.k, done.v)
        cache = kv.KVCache(*pallas.write(engine, state.cache.k, state.cache.v, new, done.page, done.offset))
        return dataclasses.replace(
            state, cache=cache, tail=_in_tail(engine, state, done, drafting), context=done.context
        )
    chunk, axis = reproducible.WIDTH if engine.reproducible else engine.batch, 0 if engine.unrolled else 1

    def put(i: jax.Array, cache: kv.KVCache) -> kv.KVCache:
        def part(x: jax.Array, axis: int = 0) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis)

        k, v = (jax.tree.map(lambda x: part(x, axis), new) for new in (done.k, done.v))
        page, offset = part(done.page), part(done.offset)
        return kv.KVCache(k=kv.write(cache.k, k, page, offset), v=kv.write(cache.v, v, page, offset))

    # By chunks, so that a narrow step does not pay for the widest one's padding.
    cache = jax.lax.fori_loop(0, done.width // chunk, put, state.cache)
    return dataclasses.replace(state, cache=cache, tail=_in_tail(engine, state, done, drafting), context=done.context)


def _in_tail(engine: Engine, state: State, done: Done, drafting: jax.Array) -> kv.Tail:
    """The tail with each drafted token's keys and values in it."""
    tail, axis = state.tail, 0 if engine.unrolled else 1
    if not engine.d_max:
        return tail
    row = jnp.arange(engine.batch, dtype=jnp.int32)
    slot = jnp.where(drafting, state.slots.drafted, engine.d_max)  # out of range: dropped
    k, v = (jax.tree.map(lambda x: jnp.take(x, done.first, axis=axis), new) for new in (done.k, done.v))
    if engine.implementation == "pallas":
        return kv.Tail(*pallas.write(engine, tail.k, tail.v, (k, v), row, slot))
    return kv.Tail(k=kv.write(tail.k, k, row, slot), v=kv.write(tail.v, v, row, slot))


def outdated(engine: Engine, state: State, slots: Slots, drafting: jax.Array, verified: jax.Array) -> State:
    """The state with `slots`, where the rows whose selection no longer holds are marked as stale.

    A request's first selection is made here, because the scheduler asks how much a draft of it would read; the later
    ones when it is about to draft (`renew`).
    """
    if not engine.d_max:
        return dataclasses.replace(state, slots=slots)
    first = state.slots.fresh & verified
    selection = jax.lax.cond(
        jnp.any(first), lambda s: _selected(engine, s, slots.length, first), lambda s: s.selection, state
    )
    stale = slots.stale | (drafting | verified if engine.plan.renew == "step" else verified)
    return dataclasses.replace(state, selection=selection, slots=dataclasses.replace(slots, stale=stale))


def renew(engine: Engine, state: State, due: jax.Array) -> State:
    """New selections of all stale rows and copies of their pages, where that is `due` (scalar bool).

    It is where a stale row is about to draft: a row that goes on decoding plainly selects nothing.
    """
    stale = state.slots.stale

    def fresh(state: State) -> tuple[jax.Array, kv.KVCache]:
        chosen = _selected(engine, state, state.slots.length, stale)
        return chosen, _copy(engine, state, chosen) if engine.copies else state.compact

    selection, compact = jax.lax.cond(due, fresh, lambda s: (s.selection, s.compact), state)
    # Selected and copied for every row, from each row's current scores and cache: none is outdated now.
    slots = dataclasses.replace(state.slots, stale=jnp.where(due, False, stale))
    return dataclasses.replace(state, selection=selection, compact=compact, slots=slots)


def _selected(engine: Engine, state: State, lengths: jax.Array, rows: jax.Array) -> jax.Array:
    """The state's selection, with `rows` [B] bool chosen anew for `lengths` [B]."""
    chosen = engine.context.select(state.context, lengths, engine.room)
    return jnp.where(rows.reshape(1, -1, *(1,) * (chosen.ndim - 2)), chosen, state.selection)


def _copy(engine: Engine, state: State, selection: jax.Array) -> kv.KVCache:
    """The pages of `selection`, copied together where a layer reads them from there."""

    def one(leaves: kv.Leaves, old: kv.Leaves, layer: int) -> jax.Array:
        at = layer if engine.unrolled else jnp.int32(layer)
        if not engine.plan.reads_copy(layer):
            return kv.leaf(old, at)
        return kv.selected_view(kv.leaf(leaves, at), state.slots.table, selection[engine.plan.sets[layer]])

    def all_layers(leaves: kv.Leaves, old: kv.Leaves) -> kv.Leaves:
        copies = [one(leaves, old, layer) for layer in range(engine.config.n_layers)]
        return tuple(copies) if engine.unrolled else jnp.stack(copies)

    cache, old = state.cache, state.compact
    return kv.KVCache(all_layers(cache.k, old.k), all_layers(cache.v, old.v))
