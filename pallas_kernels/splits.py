"""The long part of attention: query tiles over page lists, split over the keys. One program per (tile, KV head, split).

Source: split-KV decoding (arXiv 2311.01282), online softmax (arXiv 1805.02867), paged keys (arXiv 2309.06180).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import LOG2_E, MASKED, Implementation, call, ceil_div, dot, power_of_two
from pallas_kernels.lists import PageLists, QueryRows, entry_of
from pallas_kernels.tiling import Tiling


def split_count(lists: PageLists, page_size: int, cut: Tiling) -> int:
    """Splits of the longest possible list."""
    return ceil_div(lists.ids.shape[-1] * page_size, cut.split)


def over_splits(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    lists: PageLists,
    rows: QueryRows,
    cut: Tiling,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every row's queries over each split of its list.

    Args:
      q: packed queries [T, Hkv, G, D].
      k, v: the whole cache [L, Hkv, pages, page_size, D]; layer: scalar int32.

    Returns:
      Outputs [splits, B * tiles * queries, Hkv, G, D] float32, normalised within the split, and the base-2 log-sum-exp
      [splits, B * tiles * queries, Hkv, G] of their scores. Entries of idle rows, of absent queries and of splits
      behind a row's list are not written.
    """
    batch, (heads, group, dim) = rows.first.shape[0], q.shape[1:]
    count = split_count(lists, k.shape[3], cut)
    shape = (count, batch * cut.tiles * cut.queries, heads, group)
    out_shape = (jax.ShapeDtypeStruct((*shape, dim), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(
        functools.partial(_kernel, cut=cut),
        out_shape,
        (batch * cut.tiles, heads, count),
        *(layer.reshape(1), rows.first, rows.queries, lists.used, lists.ids, lists.counts, q, k, v),
        implementation=implementation,
        name=f"attention_{cut.rows}",
        warps=cut.warps,
        stages=cut.stages,
    )


def _kernel(
    layer: Any, first: Any, queries: Any, used: Any, ids: Any, counts: Any, q: Any, k: Any, v: Any, out: Any, lse: Any,
    *, cut: Tiling,
) -> None:  # fmt: skip
    tile, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group, dim, page_size = q.shape[2], q.shape[3], k.shape[3]
    row, part = tile // cut.tiles, tile % cut.tiles
    blocks = cut.split // cut.block
    begin = split * blocks
    end = jnp.minimum(begin + blocks, ceil_div(used[row] * page_size, cut.block))

    @pl.when((queries[row] > part * cut.queries) & (begin < end))
    def _work() -> None:
        d = jnp.arange(power_of_two(dim), dtype=jnp.int32)[None]
        index = jnp.arange(cut.rows, dtype=jnp.int32)
        query, member = index // group, index % group
        valid = (query < cut.queries) & (part * cut.queries + query < queries[row])
        token = first[row] + part * cut.queries + query
        at = (token[:, None], head, member[:, None], d)
        q_tile = plt.load(q.at[at], mask=valid[:, None] & (d < dim), other=0)

        def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            key = i * cut.block + jnp.arange(cut.block, dtype=jnp.int32)
            entry, offset = key // page_size, key % page_size
            inside = entry < used[row]
            entry = jnp.where(inside, entry, 0)
            page = plt.load(entry_of(ids, row, head, entry), mask=inside, other=0)
            seen = offset < plt.load(entry_of(counts, row, head, entry), mask=inside, other=0)
            page = jnp.where(seen, page, 0)  # a hole's page may be any number
            at = (layer[0], head, page[:, None], offset[:, None], d)
            mask = seen[:, None] & (d < dim)
            keys = plt.load(k.at[at], mask=mask, other=0)
            score = dot(q_tile, keys.T) * (LOG2_E * np.float32(dim**-0.5))
            score = jnp.where(seen[None], score, MASKED)
            new_top = jnp.maximum(top, jnp.max(score, axis=1))
            weight = jnp.where(seen[None], jnp.exp2(score - new_top[:, None]), np.float32(0.0))
            scale = jnp.exp2(top - new_top)
            values = plt.load(v.at[at], mask=mask, other=0)
            acc = acc * scale[:, None] + dot(weight.astype(values.dtype), values)
            return acc, new_top, total * scale + jnp.sum(weight, axis=1)

        acc = jnp.zeros((cut.rows, d.shape[1]), jnp.float32)
        start = (acc, jnp.full((cut.rows,), MASKED), jnp.zeros((cut.rows,), jnp.float32))
        acc, top, total = jax.lax.fori_loop(begin, end, block, start)
        some = total > 0
        acc = acc * (np.float32(1.0) / jnp.where(some, total, np.float32(1.0)))[:, None]
        # Masked entries keep places of their own: the interpreter writes an old value back where a store is masked.
        place = tile * cut.queries + query
        plt.store(out.at[split, place[:, None], head, member[:, None], d], acc, mask=valid[:, None] & (d < dim))
        plt.store(
            lse.at[split, place, head, member],
            jnp.where(some, top + jnp.log2(jnp.where(some, total, np.float32(1.0))), MASKED),
            mask=valid,
        )
