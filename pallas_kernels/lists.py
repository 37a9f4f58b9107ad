"""What the kernels are told about rows: which pages each may read, and where its queries lie among the packed ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.launch import ceil_div


class PageLists(NamedTuple):
    """The pages each row attends over: a row's whole table or a selection from it, whatever the order.

    Attributes:
      ids: [B, n] int32 pages in the pool, or [B, Hkv, n] where KV heads read different ones; where `counts` is 0
        anything.
      counts: as `ids`, tokens of each listed page that may be read; 0 for a hole.
      used: [B] int32 entries to look at; those behind are not read. 0 for a row with nothing to do.
    """

    ids: jax.Array
    counts: jax.Array
    used: jax.Array


class QueryRows(NamedTuple):
    """Where each row's query tokens lie among the packed ones.

    Attributes:
      first: [B] int32 packed index of a row's first query token.
      queries: [B] int32 how many it has; 0 for an idle row.
    """

    first: jax.Array
    queries: jax.Array


def whole_table(table: jax.Array, lengths: jax.Array, page_size: int) -> PageLists:
    """The committed tokens of each row: its page table [B, P] up to `lengths` [B] tokens."""
    start = jnp.arange(table.shape[1], dtype=jnp.int32)[None] * page_size
    counts = jnp.clip(lengths[:, None] - start, 0, page_size)
    return PageLists(table, counts.astype(jnp.int32), ceil_div(lengths, page_size).astype(jnp.int32))


def selected_pages(table: jax.Array, selection: jax.Array, lengths: jax.Array, page_size: int) -> PageLists:
    """Pages chosen from each row's table.

    Args:
      table: [B, P] int32.
      selection: [B, n] or [B, Hkv, n] int32 positions in the table, negative where unused.
      lengths: [B] committed tokens; 0 for a row with nothing to do.
    """
    chosen = jnp.maximum(selection, 0)
    batch, entries = selection.shape[0], selection.shape[-1]
    ids = jnp.take_along_axis(table, chosen.reshape(batch, -1), axis=1).reshape(selection.shape)
    left = lengths.reshape(-1, *(1,) * (selection.ndim - 1)) - chosen * page_size
    counts = jnp.where(selection >= 0, jnp.clip(left, 0, page_size), 0)
    place = jax.lax.broadcasted_iota(jnp.int32, selection.shape, selection.ndim - 1) + 1
    last = jnp.where(counts > 0, place, 0).reshape(batch, counts.size // max(batch, 1))
    used = jnp.max(last, axis=1, initial=0) if entries else jnp.zeros((batch,), jnp.int32)
    return PageLists(ids, counts.astype(jnp.int32), used.astype(jnp.int32))


def entry_of(array: Any, row: Any, head: Any, entry: Any) -> Any:
    """Address of a list's entries in a kernel, whether or not heads have lists of their own."""
    return array.at[row, head, entry] if len(array.shape) == 3 else array.at[row, entry]


def of_every_head(lists: PageLists, heads: int) -> tuple[jax.Array, jax.Array]:
    """`ids` and `counts` [B, Hkv, n] in which unused entries are page 0 with no token."""
    ids, counts = (x if x.ndim == 3 else jnp.repeat(x[:, None], heads, axis=1) for x in (lists.ids, lists.counts))
    place = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 2)
    counts = jnp.where(place < lists.used[:, None, None], counts, 0)
    return jnp.where(counts > 0, ids, 0), counts
