"""Page scores: the softmax mass each page holds, from keys and a log-sum-exp that attention has already found.

Source: ASPIRE, arXiv 2609.17943, section 3 (largest weight over the heads, summed over the page, first and last query).
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import LEAST_ROWS, LOG2_E, Implementation, call, ceil_div, dot, power_of_two
from pallas_kernels.lists import PageLists

Heads = Literal["max", "mean", "kv"]
_KEYS = 64


def page_scores(
    q: jax.Array,
    lse: jax.Array,
    k: jax.Array,
    layer: jax.Array,
    lists: PageLists,
    *,
    heads: Heads,
    implementation: Implementation,
) -> jax.Array:
    """Softmax mass of each listed page, the mean over a row's queries.

    Args:
      q: [B, Q, Hkv, G, D] the queries to score with, few: a verification's first and last, a draft's one.
      lse: [B, Q, Hkv, G] float32 natural log-sum-exp of their scores over all their keys, also those not listed here.
      k: keys of the whole cache [L, Hkv, pages, page_size, D]; layer: scalar int32.
      lists: pages to score, [B, n], the same for all heads.
      heads: how weights combine over query heads: "max" or "mean" over all of them, "kv" mean over each group.

    Returns:
      [B, n] float32, or [B, Hkv, n] for "kv"; 0 for holes and behind a list's end.
    """
    if implementation == "xla":
        return _twin(q, lse, k, layer, lists, heads)
    batch, _, kv_heads = q.shape[:3]
    entries, page_size = lists.ids.shape[1], k.shape[3]
    pages = max(1, _KEYS // power_of_two(page_size))
    shape = (batch, kv_heads, entries) if heads == "kv" else (batch, entries)
    return call(
        functools.partial(_kernel, heads=heads, pages=pages),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        (ceil_div(entries, pages), batch),
        *(layer.reshape(1), lists.used, lists.ids, lists.counts, q, lse, k),
        implementation=implementation,
        name=f"page_scores_{heads}",
        stages=3 if k.dtype.itemsize * power_of_two(q.shape[-1]) <= 256 else 2,
    )


def _kernel(
    layer: Any, used: Any, ids: Any, counts: Any, q: Any, lse: Any, k: Any, out: Any, *, heads: Heads, pages: int
) -> None:
    chunk, row = pl.program_id(0), pl.program_id(1)
    queries, kv_heads, group, dim = q.shape[1:]
    entries, page_size = ids.shape[1], k.shape[3]
    wide = power_of_two(page_size)
    rows = max(power_of_two(queries * group), LEAST_ROWS)
    page_entry = chunk * pages + jnp.arange(pages, dtype=jnp.int32)
    is_entry = page_entry < entries

    def place(head: Any) -> Any:
        return out.at[row, head, page_entry] if heads == "kv" else out.at[row, page_entry]

    def nothing(head: Any) -> None:
        plt.store(place(head), jnp.zeros((pages,), jnp.float32), mask=is_entry)

    if heads == "kv":
        _ = [pl.when(chunk * pages >= used[row])(functools.partial(nothing, h)) for h in range(kv_heads)]
    else:
        pl.when(chunk * pages >= used[row])(functools.partial(nothing, 0))

    @pl.when(chunk * pages < used[row])
    def _work() -> None:
        d = jnp.arange(power_of_two(dim), dtype=jnp.int32)[None]
        index = jnp.arange(rows, dtype=jnp.int32)
        end, member = index // group, index % group
        valid = end < queries
        end = jnp.where(valid, end, 0)
        key = jnp.arange(pages * wide, dtype=jnp.int32)
        entry, offset = chunk * pages + key // wide, key % wide
        inside = entry < used[row]
        entry = jnp.where(inside, entry, 0)
        seen = offset < plt.load(counts.at[row, entry], mask=inside, other=0)
        page = jnp.where(seen, plt.load(ids.at[row, entry], mask=inside, other=0), 0)
        offset = jnp.where(seen, offset, 0)
        both = valid[:, None] & seen[None]

        def weights(head: jax.Array) -> jax.Array:  # [rows, keys]
            at = (row, end[:, None], head, member[:, None], d)
            queries_of = plt.load(q.at[at], mask=valid[:, None] & (d < dim), other=0)
            at = (layer[0], head, page[:, None], offset[:, None], d)
            keys = plt.load(k.at[at], mask=seen[:, None] & (d < dim), other=0)
            whole = plt.load(lse.at[row, end, head, member], mask=valid, other=0.0) * LOG2_E
            score = dot(queries_of, keys.T) * (LOG2_E * np.float32(dim**-0.5))
            return jnp.where(both, jnp.exp2(score - whole[:, None]), np.float32(0.0))

        def per_page(token: jax.Array) -> jax.Array:
            return jnp.sum(token.reshape(pages, wide), axis=1)

        if heads == "kv":

            def store(head: jax.Array, carry: jax.Array) -> jax.Array:
                mean = jnp.sum(weights(head), axis=0) * np.float32(1.0 / (group * queries))
                plt.store(place(head), per_page(mean), mask=is_entry)
                return carry

            jax.lax.fori_loop(0, kv_heads, store, jnp.int32(0))
        elif heads == "mean":

            def add(head: jax.Array, token: jax.Array) -> jax.Array:
                return token + jnp.sum(weights(head), axis=0)

            token = jax.lax.fori_loop(0, kv_heads, add, jnp.zeros((pages * wide,), jnp.float32))
            plt.store(place(0), per_page(token) * np.float32(1.0 / (kv_heads * group * queries)), mask=is_entry)
        else:

            def largest(head: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                w = weights(head)
                ours = [jnp.max(jnp.where((end == e)[:, None], w, np.float32(0.0)), axis=0) for e in range(queries)]
                return tuple(jnp.maximum(a, b) for a, b in zip(best, ours, strict=True))

            zeros = tuple(jnp.zeros((pages * wide,), jnp.float32) for _ in range(queries))
            best = jax.lax.fori_loop(0, kv_heads, largest, zeros)
            total = functools.reduce(jnp.add, best)
            plt.store(place(0), per_page(total) * np.float32(1.0 / queries), mask=is_entry)


def _twin(q: jax.Array, lse: jax.Array, k: jax.Array, layer: jax.Array, lists: PageLists, heads: Heads) -> jax.Array:
    batch, _, kv_heads, _, dim = q.shape
    entries, page_size = lists.ids.shape[1], k.shape[3]
    listed = jnp.arange(entries, dtype=jnp.int32)[None] < lists.used[:, None]
    counts = jnp.where(listed, lists.counts, 0)
    seen = jnp.arange(page_size, dtype=jnp.int32)[None, None] < counts[:, :, None]
    picked = jax.lax.dynamic_index_in_dim(k, layer, keepdims=False)[:, jnp.where(counts > 0, lists.ids, 0)]
    picked = jnp.where(seen[None, :, :, :, None], picked.astype(jnp.float32), 0.0)
    keys = picked.swapaxes(0, 1).reshape(batch, kv_heads, entries * page_size, dim)
    scores = jnp.einsum("bqhgd,bhsd->bqhgs", q.astype(jnp.float32), keys, precision=jax.lax.Precision.HIGHEST)
    visible = seen.reshape(batch, 1, 1, 1, -1)
    weights = jnp.where(visible, jnp.exp(scores * dim**-0.5 - lse[..., None]), 0.0)
    combined = {
        "max": lambda: jnp.max(weights, axis=(2, 3)),
        "mean": lambda: jnp.mean(weights, axis=(2, 3)),
        "kv": lambda: jnp.mean(weights, axis=3),
    }[heads]()
    return jnp.mean(combined.reshape(*combined.shape[:-1], entries, page_size).sum(axis=-1), axis=1)
