"""What the kernels are told about rows: which pages each may read, and where its queries lie among the packed ones."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.launch import ceil_div


class PageLists(NamedTuple):
    """The pages each row attends over: a row's whole table or a selection from it, whatever the order.

    Attributes:
      ids: [B, n] int32 pages in the pool; where `counts` is 0 anything.
      counts: [B, n] int32 tokens of each listed page that may be read; 0 for a hole.
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
      selection: [B, n] int32 positions in the table, negative where unused.
      lengths: [B] committed tokens; 0 for a row with nothing to do.
    """
    chosen = jnp.maximum(selection, 0)
    ids = jnp.take_along_axis(table, chosen, axis=1)
    counts = jnp.where(selection >= 0, jnp.clip(lengths[:, None] - chosen * page_size, 0, page_size), 0)
    place = jnp.arange(1, selection.shape[1] + 1, dtype=jnp.int32)[None]
    used = jnp.max(jnp.where(counts > 0, place, 0), axis=1, initial=0)
    return PageLists(ids, counts.astype(jnp.int32), used.astype(jnp.int32))
