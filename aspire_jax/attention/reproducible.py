"""Attention that computes a token alike, to the last bit, wherever its neighbours' keys are kept.

Plain decoding finds all earlier keys in the cache; a verification finds the last few among its own step's tokens. Here
both are laid out alike before anything is summed: blocks of keys, cut at absolute positions, with new tokens' keys put
in their places. A block in which a query sees no key changes no bit of its result.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from aspire_jax.attention.softmax import Partial, attend, merge, nothing
from aspire_jax.attention.xla import Tiles
from aspire_jax.cache import block_view


class New(NamedTuple):
    """The tokens a step verifies, row by row.

    Attributes:
      k, v: [B, M, Hkv, D] keys and values of each row's new tokens, in order.
      number: [B] of them; 0 for a row whose queries see committed tokens only.
    """

    k: jax.Array
    v: jax.Array
    number: jax.Array


def new_tokens(k: jax.Array, v: jax.Array, first: jax.Array, number: jax.Array, most: int) -> New:
    """Packed tokens' `k`, `v` [T, Hkv, D] row by row: `number` [B] tokens from `first` [B] on, `most` at most."""
    index = jnp.minimum(first[:, None] + jnp.arange(most, dtype=jnp.int32)[None], k.shape[0] - 1)
    return New(k[index], v[index], number)


def over_tiles(
    q: jax.Array, k: jax.Array, v: jax.Array, new: New, table: jax.Array, tiles: Tiles, block: int, consecutive: bool
) -> tuple[Partial, jax.Array, jax.Array]:
    """Causal attention over committed and new tokens together, tile by tile and block by block.

    Args:
      q: [N, Q, Hkv, G, D] the tiles' queries; query j of a tile is its row's new token `tiles.first + j`.
      k, v: one layer's pages [Hkv, pages, page_size, D].
      new: the new tokens, which follow the row's committed ones.
      table: page table [B, P].
      block: keys read at a time, whole pages; divides a row's capacity.

    Returns:
      Partial over [N, Q, Hkv, G], and `k` and `v` as they went in (see `xla.over_tiles`).
    """
    n, queries, heads, group, dim = q.shape
    columns, most = queries * group, new.k.shape[1]
    q = q.transpose(0, 2, 1, 3, 4).reshape(n, heads, columns, dim)
    fresh = [x.transpose(0, 2, 1, 3).astype(k.dtype) for x in (new.k, new.v)]  # [B, Hkv, M, D], as the cache rounds
    count = new.number[tiles.row]
    seen = tiles.keys + jnp.minimum(count, tiles.first + queries)  # by the tile's last query
    blocks = jnp.where((tiles.keys > 0) | (tiles.first < count), (seen + block - 1) // block, 0)
    ends = jnp.cumsum(blocks)

    def body(i: jax.Array, carry: tuple[Partial, jax.Array, jax.Array]) -> tuple[Partial, jax.Array, jax.Array]:
        done, k, v = carry
        t = jnp.sum(i >= ends).astype(jnp.int32)
        row, committed = tiles.row[t], tiles.keys[t]
        start = (i - (ends[t] - blocks[t])).astype(jnp.int32) * block
        place = committed - start + jnp.arange(most, dtype=jnp.int32)
        here = (place >= 0) & (place < block) & (jnp.arange(most, dtype=jnp.int32) < count[t])
        place = jnp.where(here, place, block)  # out of range: dropped

        def put(pages: jax.Array, tokens: jax.Array) -> jax.Array:
            keys = block_view(pages, table, consecutive, row, start, block)
            return jax.lax.cond(jnp.any(here), lambda: keys.at[:, place].set(tokens[row], mode="drop"), lambda: keys)

        own = tiles.first[t] + jnp.arange(queries, dtype=jnp.int32) + 1
        limit = committed + jnp.where(count[t] > 0, own, 0)  # [Q] the first position that a query does not see
        limit = jnp.repeat(limit, group, total_repeat_length=columns)
        visible = (start + jnp.arange(block, dtype=jnp.int32))[None, None] < limit[None, :, None]
        keys, values = jax.lax.optimization_barrier((put(k, fresh[0]), put(v, fresh[1])))
        part = jax.lax.optimization_barrier(attend(q[t], keys, values, visible))
        both = merge(Partial(*(x[t] for x in done)), part)
        k, v = jax.lax.optimization_barrier((k, v))  # keeps them in the carry
        return Partial(*(x.at[t].set(y) for x, y in zip(done, both, strict=True))), k, v

    part, k, v = jax.lax.fori_loop(0, ends[-1].astype(jnp.int32), body, (nothing(q), k, v))

    def turn(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(n, heads, queries, group, *x.shape[3:]), 1, 2)

    return Partial(*(turn(x) for x in part)), k, v
