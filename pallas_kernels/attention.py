"""Mixed paged attention: rows that draft, rows that verify and chunks of a prompt are the same call.

Drafting and verifying differ in their page lists and query counts alone. Call it once for each kind of row, so that a
row of one query does not pay for the tile of a row of many.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import combine as combining
from pallas_kernels import splits
from pallas_kernels.combine import NewTokens, Tail
from pallas_kernels.launch import MASKED, Implementation
from pallas_kernels.lists import PageLists, QueryRows, of_every_head
from pallas_kernels.tiling import tiling

_PRECISION = jax.lax.Precision.HIGHEST


def mixed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    lists: PageLists,
    rows: QueryRows,
    near: NewTokens | Tail,
    *,
    max_queries: int,
    implementation: Implementation,
    tile_rows: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over their rows' page lists and the step's new tokens.

    Args:
      q: [T, Hkv, G, D].
      k, v: the whole cache [L, Hkv, pages, page_size, D], not sliced; layer: scalar int32.
      lists: pages each row reads.
      rows: where each row's queries lie; at most `max_queries` (static) each.
      near: the new tokens' keys and values.
      tile_rows: see `tiling.tiling`.

    Returns:
      Outputs [T, Hkv, G, D] and natural log-sum-exps [T, Hkv, G], float32. Tokens that belong to no row are undefined
      (the twin gives 0 and the lowest score).
    """
    if isinstance(near, Tail) and max_queries != 1:
        raise ValueError(f"max_queries: {max_queries}, expected 1 where rows draft")
    if implementation == "xla":
        return _twin(q, k, v, layer, lists, rows, near)
    page_size = k.shape[3]
    cut = tiling(
        batch=rows.first.shape[0],
        heads=q.shape[1],
        group=q.shape[2],
        dim=q.shape[3],
        itemsize=k.dtype.itemsize,
        max_queries=max_queries,
        keys=lists.ids.shape[-1] * page_size,
        rows=tile_rows,
    )
    partial = splits.over_splits(q, k, v, layer, lists, rows, cut, implementation)
    return combining.combine(q, partial, layer, lists, rows, near, page_size, cut, implementation)


def _twin(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    lists: PageLists,
    rows: QueryRows,
    near: NewTokens | Tail,
) -> tuple[jax.Array, jax.Array]:
    """`mixed_attention` in jnp: every token gathers its row's pages and the new tokens beside them."""
    tokens, heads, _, dim = q.shape
    index = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    owned = (index >= rows.first[None]) & (index < (rows.first + rows.queries)[None])  # [T, B]
    row, owner = jnp.argmax(owned, axis=1), jnp.any(owned, axis=1)
    query = index[:, 0] - rows.first[row]
    page_size, batch = k.shape[3], rows.first.shape[0]
    ids, counts = of_every_head(lists, heads)  # [B, Hkv, n]
    seen = jnp.arange(page_size, dtype=jnp.int32).reshape(1, 1, 1, -1) < counts[..., None]
    head = jnp.arange(heads, dtype=jnp.int32).reshape(1, -1, 1)

    def far(pages: jax.Array) -> jax.Array:  # [B, Hkv, n * page_size, D]
        picked = jax.lax.dynamic_index_in_dim(pages, layer, keepdims=False)[head, ids]
        return jnp.where(seen[..., None], picked.astype(jnp.float32), 0.0).reshape(batch, heads, -1, dim)

    # Beside them the new keys: [T, Hkv, N, D] and which of them each token sees [T, N].
    if isinstance(near, Tail):
        count = near.length[row]
        slot = jnp.arange(near.tail_k.shape[3] + 1, dtype=jnp.int32)[None]
        near_seen = slot <= count[:, None]

        def beside(x: jax.Array, tail: jax.Array) -> jax.Array:
            old = jax.lax.dynamic_index_in_dim(tail, layer, keepdims=False)[:, row].swapaxes(0, 1)
            old = jnp.pad(old.astype(jnp.float32), ((0, 0), (0, 0), (0, 1), (0, 0)))
            now = (slot == count[:, None])[:, None, :, None]
            old = jnp.where((slot < count[:, None])[:, None, :, None], old, 0.0)
            return jnp.where(now, x.astype(jnp.float32)[:, :, None], old)

        near_k, near_v = beside(near.k, near.tail_k), beside(near.v, near.tail_v)
    else:
        other = index.T  # [1, T]
        same = (row[:, None] == row[None]) & owner[None] & owner[:, None]
        near_seen = same & (other - rows.first[row][:, None] <= query[:, None])

        def everyone(x: jax.Array) -> jax.Array:
            wide = jnp.where(owner[:, None, None], x.astype(jnp.float32), 0.0).swapaxes(0, 1)[None]
            return jnp.broadcast_to(wide, (tokens, *wide.shape[1:]))

        near_k, near_v = everyone(near.k), everyone(near.v)
    keys = jnp.concatenate([far(k)[row], near_k], axis=2)
    values = jnp.concatenate([far(v)[row], near_v], axis=2)
    near_seen = jnp.repeat(near_seen[:, None], heads, axis=1)
    visible = jnp.concatenate([seen.reshape(batch, heads, -1)[row], near_seen], axis=2) & owner[:, None, None]
    scores = jnp.einsum("thgd,thsd->thgs", q.astype(jnp.float32), keys, precision=_PRECISION) * dim**-0.5
    scores = jnp.where(visible[:, :, None], scores, MASKED)
    top = jnp.max(scores, axis=-1)
    weights = jnp.where(visible[:, :, None], jnp.exp(scores - top[..., None]), 0.0)
    total = jnp.sum(weights, axis=-1)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("thgs,thsd->thgd", weights / safe[..., None], values, precision=_PRECISION)
    return out, jnp.where(total > 0, top + jnp.log(safe), MASKED)
