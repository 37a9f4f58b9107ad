"""Mixed-mode attention in plain XLA: the reference, and the path a CPU takes.

Three ways to read the cache, because on a CPU the copies decide:
  `over_rows`    every row's whole context in one batched product; nothing is copied where rows own consecutive pages.
  `over_tiles`   a loop over (row, query tile, key block) with work to do; each block is copied once, idle rows and
                 the unused ends of short rows cost nothing.
  `over_context` a drafting row's selected pages (compact) and its tail.
Queries are laid out [Hkv, B, N, D] with N = query tokens x group, query-major.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.attention.softmax import MASKED, Partial, attend, attend_keeping, scores_of
from aspire_jax.cache import block_view, rows_view


def heads_first(x: jax.Array) -> jax.Array:
    """[B, Q, Hkv, G, D] -> [Hkv, B, Q * G, D]."""
    b, q, h, g, d = x.shape
    return x.transpose(2, 0, 1, 3, 4).reshape(h, b, q * g, d)


def rows_first(part: Partial, queries: int) -> Partial:
    """A partial over [Hkv, B, Q * G] as one over [B, Q, Hkv, G]."""
    h, b, n = part.top.shape
    shape = (h, b, queries, n // queries)

    def turn(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(*shape, *x.shape[3:]), 0, 2)

    return Partial(*(turn(x) for x in part))


def over_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array, consecutive: bool
) -> Partial:
    """Full attention of every row over its committed tokens.

    Args:
      q: [B, Q, Hkv, G, D].
      k, v: one layer's pages [Hkv, pages, page_size, D].
      table: page table [B, P].
      lengths: committed tokens [B]; 0 for a row with nothing to do.

    Returns:
      Partial over [B, Q, Hkv, G].
    """
    keys, values = rows_view(k, table, consecutive), rows_view(v, table, consecutive)
    visible = jnp.arange(keys.shape[2])[None, None, None, :] < lengths[None, :, None, None]
    return rows_first(attend(heads_first(q), keys, values, visible), q.shape[1])


class Seen(NamedTuple):
    """What E queries of each row attended to: the first and the last, or the only one.

    Attributes:
      weights: [Hkv, B, E * G, P] = exp(score - top), summed over pages (of one token, where tokens are wanted).
      top: [B, E, Hkv, G].
    """

    weights: jax.Array
    top: jax.Array

    def of(self, lse: jax.Array) -> jax.Array:
        """Softmax weights [B, E, Hkv, G, P] under the log-sum-exp over all keys [B, E, Hkv, G]."""
        rows, ends, heads, group = self.top.shape
        weights = self.weights.reshape(heads, rows, ends, group, -1).transpose(1, 2, 0, 3, 4)
        return weights * jnp.exp(self.top - lse)[..., None]


def first_and_last(last: jax.Array, group: int) -> jax.Array:
    """Columns [N, 2 * G] of the first query and of the `last` [N]; a query is `group` columns, one a query head."""
    queries = jnp.stack([jnp.zeros_like(last), last], axis=1)
    columns = queries[:, :, None] * group + jnp.arange(group, dtype=jnp.int32)[None, None]
    return columns.reshape(columns.shape[0], -1)


def over_rows_keeping(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    consecutive: bool,
    last: jax.Array,
    page: int = 1,
) -> tuple[Partial, Seen]:
    """As `over_rows`, and what the first and the `last` [B] query of each row attended to, by pages of `page` tokens.

    Taken from the product that attention needs anyway: reading the keys once more for it costs a CPU a quarter of a
    verification.
    """
    queries, group = q.shape[1], q.shape[3]
    keys, values = rows_view(k, table, consecutive), rows_view(v, table, consecutive)
    visible = jnp.arange(keys.shape[2])[None, None, None, :] < lengths[None, :, None, None]
    column = None
    if queries > 1:
        column = first_and_last(last, group)[None]
    part, weights = attend_keeping(heads_first(q), keys, values, visible, column, page)  # [Hkv, B, E * G, P]
    tops = part.top if column is None else jnp.take_along_axis(part.top, column, axis=2)
    tops = tops.reshape(*tops.shape[:2], -1, group).transpose(1, 2, 0, 3)
    return rows_first(part, queries), Seen(weights, tops)


class Tiles(NamedTuple):
    """Work list of `over_tiles`: query tiles in row order, unused entries at the end.

    Attributes:
      row: [N] row of each tile.
      first: [N] index of the tile's first query among the row's own.
      keys: [N] committed tokens to attend over; 0 for an unused tile.
      of_row: [B] a row's first tile.
    """

    row: jax.Array
    first: jax.Array
    keys: jax.Array
    of_row: jax.Array


def tile(queries: jax.Array, lengths: jax.Array, size: int, capacity: int) -> Tiles:
    """Cuts each row's `queries` [B] (0: no tile) into tiles of `size` queries; `capacity` bounds their number."""
    count = (queries + size - 1) // size
    ends = jnp.cumsum(count)
    index = jnp.arange(capacity, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), queries.shape[0] - 1)
    row = row.astype(jnp.int32)
    of_row = (ends - count).astype(jnp.int32)
    return Tiles(row, (index - of_row[row]) * size, jnp.where(index < ends[-1], lengths[row], 0), of_row)


def over_tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    tiles: Tiles,
    block: int,
    consecutive: bool,
    kept: jax.Array | None = None,
    page: int = 1,
) -> tuple[Partial, jax.Array | None, jax.Array, jax.Array]:
    """Full attention, tile by tile and block by block.

    Args:
      q: [N, Q, Hkv, G, D] the tiles' queries.
      k, v: one layer's pages [Hkv, pages, page_size, D].
      table: page table [B, P].
      block: keys read at a time, whole pages, at most a row's capacity; blocks are cut at absolute positions.
      kept: [N, C] int32, of each tile's queries (Q x G of them) those whose weights are wanted; None: of none.
      page: tokens, over which they are summed; divides a block.

    Returns:
      Partial over [N, Q, Hkv, G]; weights [N, Hkv, C, P] = exp(score - top) by page, None where none are kept; and `k`
      and `v` as they went in. Whoever writes to the cache afterwards must write to these: XLA copies a buffer that is
      live both inside a loop and behind it under two names.
    """
    n, queries, heads, group, dim = q.shape
    columns = queries * group
    q = q.transpose(0, 2, 1, 3, 4).reshape(n, heads, columns, dim)
    capacity = table.shape[1] * k.shape[2]
    blocks = (tiles.keys + block - 1) // block
    ends = jnp.cumsum(blocks)

    def body(
        i: jax.Array, carry: tuple[Partial, Any, jax.Array, jax.Array]
    ) -> tuple[Partial, Any, jax.Array, jax.Array]:
        done, seen, k, v = carry
        t = jnp.sum(i >= ends).astype(jnp.int32)
        number = (i - (ends[t] - blocks[t])).astype(jnp.int32)
        start = number * block
        read_from = jnp.minimum(start, capacity - block)  # the last block of a row may reach back into the one before
        keys = block_view(k, table, consecutive, tiles.row[t], read_from, block)
        values = block_view(v, table, consecutive, tiles.row[t], read_from, block)
        position = read_from + jnp.arange(block, dtype=jnp.int32)
        visible = ((position >= start) & (position < tiles.keys[t]))[None, None, :]
        if kept is None:
            part = attend(q[t], keys, values, visible)
        else:
            part, pages = attend_keeping(q[t], keys, values, visible, kept[t][None], page)
            seen = _with_block(seen, t, number, read_from // page, pages, part.top[:, kept[t]])
        old = Partial(*(x[t] for x in done))
        top = jnp.maximum(old.top, part.top)
        a, b = jnp.exp(old.top - top), jnp.exp(part.top - top)
        new = Partial(old.out * a[..., None] + part.out * b[..., None], top, old.total * a + part.total * b)
        k, v = jax.lax.optimization_barrier((k, v))  # keeps them in the carry
        return Partial(*(x.at[t].set(y) for x, y in zip(done, new, strict=True))), seen, k, v

    empty = Partial(
        jnp.zeros((n, heads, columns, dim), jnp.float32),
        jnp.full((n, heads, columns), MASKED),
        jnp.zeros((n, heads, columns), jnp.float32),
    )
    total = jnp.sum(blocks).astype(jnp.int32)
    none = None
    if kept is not None:
        shape = (n, heads, kept.shape[1])
        none = (jnp.zeros((*shape, capacity // page), jnp.float32), jnp.full((*shape, -(-capacity // block)), MASKED))
    part, seen, k, v = jax.lax.fori_loop(0, total, body, (empty, none, k, v))
    weights = None
    if kept is not None:
        weights, tops = seen  # of each block by its own largest score
        scale = jnp.exp(tops - jnp.take_along_axis(part.top, kept[:, None], axis=2)[..., None])
        weights = weights * scale[..., np.arange(capacity // page) * page // block]

    def turn(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(n, heads, queries, group, *x.shape[3:]), 1, 2)

    return Partial(*(turn(x) for x in part)), weights, k, v


def _with_block(
    seen: tuple[jax.Array, jax.Array], t: jax.Array, number: jax.Array, at: jax.Array, pages: jax.Array, top: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The weights [N, Hkv, C, P] and tops [N, Hkv, C, blocks] with those of one block of tile `t`.

    Args:
      number: of the block; at: its first page; pages: [Hkv, C, pages a block]; top: [Hkv, C].
    """
    weights, tops = seen
    zero = jnp.zeros_like(t)
    # Added: a block that reaches back into the one before holds zeros there.
    old = jax.lax.dynamic_slice(weights, (t, zero, zero, at), (1, *pages.shape))
    weights = jax.lax.dynamic_update_slice(weights, old + pages[None], (t, zero, zero, at))
    return weights, jax.lax.dynamic_update_slice(tops, top[None, :, :, None], (t, zero, zero, number))


def over_context(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> Partial:
    """Attention of one query a row over keys of its own.

    Args:
      q: [B, Hkv, G, D].
      k, v: [Hkv, B, C, D] compact selected pages, or a tail.
      visible: [B, C], or [B, Hkv, C] where it differs between KV heads.

    Returns:
      Partial over [B, Hkv, G].
    """
    seen = visible[None] if visible.ndim == 2 else visible.swapaxes(0, 1)
    part = attend(q.swapaxes(0, 1), k, v, seen[:, :, None, :])
    return Partial(*(x.swapaxes(0, 1) for x in part))


def over_new(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> Partial:
    """Attention among the packed tokens of one step, whose keys are not in the cache yet.

    Args:
      q: [T, Hkv, G, D]; k, v: [T, Hkv, D].
      visible: [T, T], queries first.

    Returns:
      Partial over [T, Hkv, G].
    """
    t, heads, group, dim = q.shape
    columns = q.swapaxes(0, 1).reshape(heads, t * group, dim)
    mask = jnp.repeat(visible, group, axis=0, total_repeat_length=t * group)[None]
    part = attend(columns, k.swapaxes(0, 1), v.swapaxes(0, 1), mask)
    return Partial(*(x.reshape(heads, t, group, *x.shape[2:]).swapaxes(0, 1) for x in part))


def weights_of(
    q: jax.Array, lse: jax.Array, k: jax.Array, table: jax.Array, lengths: jax.Array, consecutive: bool
) -> jax.Array:
    """Softmax weights of committed tokens under a known denominator.

    Args:
      q: [B, Q, Hkv, G, D]; lse: log-sum-exp over all keys, also those outside the cache [B, Q, Hkv, G].
      k: one layer's pages; lengths: committed tokens [B].

    Returns:
      [B, Q, Hkv, G, S] float32.
    """
    b, queries, heads, group, _ = q.shape
    scores = scores_of(heads_first(q), rows_view(k, table, consecutive))
    scores = scores.reshape(heads, b, queries, group, -1).transpose(1, 2, 0, 3, 4)
    visible = jnp.arange(scores.shape[-1])[None] < lengths[:, None]
    return jnp.where(visible[:, None, None, None, :], jnp.exp(scores - lse[..., None]), np.float32(0.0))
