"""The short part of attention, and the sum of all: splits are merged by log-sum-exp with the step's new tokens.

New tokens' keys are not in the cache yet. They are either the row's own query tokens, each of which sees those before
it (`NewTokens`), or a drafting row's tail and its one token (`Tail`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import LEAST_ROWS, LN_2, LOG2_E, MASKED, Implementation, call, ceil_div, dot, power_of_two
from pallas_kernels.lists import PageLists, QueryRows
from pallas_kernels.splits import split_count
from pallas_kernels.tiling import Tiling

# Query rows of a program, and new keys it takes at a time: half where a key has more bytes than this. With these and
# their warps no kernel spills a register (docs/gpu_kernels.md).
_ROWS = 32
_BLOCK = 32
_WIDE = 256


class NewTokens(NamedTuple):
    """Keys and values of the packed tokens [T, Hkv, D]; a query sees its row's tokens up to itself."""

    k: jax.Array
    v: jax.Array


class Tail(NamedTuple):
    """A drafting row's tokens since its last verification, and the one it drafts from; rows have one query.

    Attributes:
      k, v: keys and values of the packed tokens [T, Hkv, D], of which a row's first is read.
      tail_k, tail_v: [L, Hkv, B, tail, D].
      length: [B] int32 tail tokens that count.
    """

    k: jax.Array
    v: jax.Array
    tail_k: jax.Array
    tail_v: jax.Array
    length: jax.Array


def combine(
    q: jax.Array,
    partial: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    lists: PageLists,
    rows: QueryRows,
    near: NewTokens | Tail,
    page_size: int,
    cut: Tiling,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """Merges `over_splits`'s results with the new tokens' part.

    Returns:
      Outputs [T, Hkv, G, D] and natural log-sum-exps [T, Hkv, G], float32; tokens of no row are not written.
    """
    tokens, heads, group, dim = q.shape
    batch, span = rows.first.shape[0], cut.tiles * cut.queries
    wide = power_of_two(dim) * q.dtype.itemsize > _WIDE
    tile_rows = max(min(_ROWS >> wide, power_of_two(span * group)), LEAST_ROWS)
    if group > tile_rows:
        raise ValueError(f"group: {group}, expected at most {tile_rows}")
    per_tile = min(tile_rows // group, span)
    tiles = ceil_div(span, per_tile)
    out_shape = (
        jax.ShapeDtypeStruct((tokens, heads, group, dim), jnp.float32),
        jax.ShapeDtypeStruct((tokens, heads, group), jnp.float32),
    )
    assert partial[0].shape[0] == split_count(lists, page_size, cut)
    static = {"cut": cut, "tile_rows": tile_rows, "per_tile": per_tile, "tiles": tiles, "page_size": page_size}
    static["keys"] = _BLOCK >> wide
    return call(
        functools.partial(_kernel, drafts=isinstance(near, Tail), **static),
        out_shape,
        (batch * tiles, heads),
        *(layer.reshape(1), rows.first, rows.queries, lists.used, q, *partial, *near),
        implementation=implementation,
        name="combine_draft" if isinstance(near, Tail) else "combine_new",
        warps=8 if tile_rows > LEAST_ROWS or wide else 4,
    )


def _kernel(
    layer: Any, first: Any, queries: Any, used: Any, q: Any, part: Any, part_lse: Any, *refs: Any,
    cut: Tiling, tile_rows: int, per_tile: int, tiles: int, page_size: int, keys: int, drafts: bool,
) -> None:  # fmt: skip
    *near, out, lse = refs
    tile, head = pl.program_id(0), pl.program_id(1)
    group, dim = q.shape[2], q.shape[3]
    row, start = tile // tiles, (tile % tiles) * per_tile

    @pl.when(queries[row] > start)
    def _work() -> None:
        d = jnp.arange(power_of_two(dim), dtype=jnp.int32)[None]
        index = jnp.arange(tile_rows, dtype=jnp.int32)
        query, member = index // group, index % group
        valid = (query < per_tile) & (start + query < queries[row])
        query = start + query
        token = first[row] + query
        wide = valid[:, None] & (d < dim)
        at = (token[:, None], head, member[:, None], d)
        q_tile = plt.load(q.at[at], mask=wide, other=0)

        def new(new_k: jax.Array, new_v: jax.Array, seen: jax.Array, carry: Any) -> tuple[jax.Array, ...]:
            """Takes in keys and values [N, D] with seen [rows, N]."""
            acc, top, total = carry
            score = dot(q_tile, new_k.T) * (LOG2_E * np.float32(dim**-0.5))
            score = jnp.where(seen, score, MASKED)
            new_top = jnp.maximum(top, jnp.max(score, axis=1))
            weight = jnp.where(seen, jnp.exp2(score - new_top[:, None]), np.float32(0.0))
            scale = jnp.exp2(top - new_top)
            acc = acc * scale[:, None] + dot(weight.astype(new_v.dtype), new_v)
            return acc, new_top, total * scale + jnp.sum(weight, axis=1)

        def split(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            place = row * (cut.tiles * cut.queries) + query
            part_top = plt.load(part_lse.at[i, place, head, member], mask=valid, other=MASKED)
            value = plt.load(part.at[i, place[:, None], head, member[:, None], d], mask=wide, other=0)
            new_top = jnp.maximum(top, part_top)
            scale = jnp.exp2(top - new_top)
            weight = jnp.where(part_top > MASKED, jnp.exp2(part_top - new_top), np.float32(0.0))
            return acc * scale[:, None] + value * weight[:, None], new_top, total * scale + weight

        carry = (
            jnp.zeros((tile_rows, d.shape[1]), jnp.float32),
            jnp.full((tile_rows,), MASKED),
            jnp.zeros((tile_rows,), jnp.float32),
        )
        keys_used = ceil_div(used[row] * page_size, cut.block)
        carry = jax.lax.fori_loop(0, ceil_div(keys_used, cut.split // cut.block), split, carry)
        if drafts:
            k, v, tail_k, tail_v, length = near
            n = max(power_of_two(tail_k.shape[3] + 1), LEAST_ROWS)
            slot = jnp.arange(n, dtype=jnp.int32)
            old = slot < jnp.minimum(length[row], tail_k.shape[3])
            waiting = (layer[0], head, row, jnp.where(old, slot, 0)[:, None], d)
            mask = old[:, None] & (d < dim)
            own = (first[row], head, d)
            now = slot == length[row]
            new_k, new_v = (
                jnp.where(
                    now[:, None],
                    plt.load(x.at[own], mask=d < dim, other=0),
                    plt.load(t.at[waiting], mask=mask, other=0),
                )
                for x, t in ((k, tail_k), (v, tail_v))
            )
            seen = jnp.broadcast_to((old | now)[None], (tile_rows, n))
            acc, top, total = new(new_k, new_v, seen, carry)
        else:
            k, v = near

            def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                other = i * keys + jnp.arange(keys, dtype=jnp.int32)
                inside = other < queries[row]
                at = (jnp.where(inside, first[row] + other, 0)[:, None], head, d)
                mask = inside[:, None] & (d < dim)
                new_k, new_v = (plt.load(x.at[at], mask=mask, other=0) for x in (k, v))
                return new(new_k, new_v, inside[None] & (other[None] <= query[:, None]), carry)

            last = jnp.minimum(queries[row], start + per_tile)
            acc, top, total = jax.lax.fori_loop(0, ceil_div(last, keys), block, carry)
        # One division a row, not one an element.
        acc = acc * (np.float32(1.0) / total)[:, None]
        plt.store(out.at[token[:, None], head, member[:, None], d], acc, mask=wide)
        plt.store(lse.at[token, head, member], (top + jnp.log2(total)) * LN_2, mask=valid)
