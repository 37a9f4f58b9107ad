"""The paged KV cache: where keys and values live, how a step writes them, how attention finds them.

The cache holds committed tokens only. A drafted token's keys and values come from sparse attention and would have to
be overwritten by its verification, so they wait in a short tail of their own (`Tail`) and never enter the cache.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from aspire_jax.config import ModelConfig

# A leaf per layer (layers unrolled) or one array with a leading layers axis (layers scanned).
Leaves = tuple[jax.Array, ...] | jax.Array


@flax.struct.dataclass
class KVCache:
    """Keys and values of committed tokens in pages.

    Attributes:
      k, v: per layer [Hkv, pages, page_size, D]; stacked as [L, Hkv, pages, page_size, D] where layers are scanned.
    """

    k: Leaves
    v: Leaves


@flax.struct.dataclass
class Tail:
    """Keys and values of the tokens a row has drafted since its last verification, pending token first.

    Attributes:
      k, v: per layer [Hkv, B, tail, D]; stacked as [L, Hkv, B, tail, D] where layers are scanned.
    """

    k: Leaves
    v: Leaves


def zeros(config: ModelConfig, middle: tuple[int, ...], dtype: Any, unrolled: bool) -> Leaves:
    """Zeroed leaves of shape [Hkv, *middle, D], one a layer or stacked."""
    shape = (config.n_kv_heads, *middle, config.head_dim)
    if unrolled:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layers))
    return jnp.zeros((config.n_layers, *shape), dtype)


def leaf(leaves: Leaves, layer: int | jax.Array) -> jax.Array:
    """One layer's leaf. A traced `layer` needs stacked leaves."""
    if isinstance(leaves, tuple):
        assert isinstance(layer, int)
        return leaves[layer]
    return jax.lax.dynamic_index_in_dim(leaves, layer, keepdims=False)


def replaced(leaves: Leaves, layer: int, new: jax.Array) -> Leaves:
    """The leaves with one layer's replaced (a leaf per layer)."""
    assert isinstance(leaves, tuple)
    return (*leaves[:layer], new, *leaves[layer + 1 :])


def consecutive_table(batch: int, pages: int) -> jax.Array:
    """The page table [B, pages] in which each row owns consecutive pages."""
    return jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)


def rows_view(pages: jax.Array, table: jax.Array, consecutive: bool) -> jax.Array:
    """Every row's tokens in order: [Hkv, B, S, D] from [Hkv, pages, page_size, D].

    Where rows own consecutive pages this is a reshape and costs nothing; else the pages are gathered.
    """
    heads, _, size, dim = pages.shape
    batch, per_row = table.shape
    if not consecutive:
        pages = pages[:, table.reshape(-1)]
    return pages[:, : batch * per_row].reshape(heads, batch, per_row * size, dim)


def block_view(
    pages: jax.Array, table: jax.Array, consecutive: bool, row: jax.Array, start: jax.Array, length: int
) -> jax.Array:
    """Tokens [start, start + length) of one row: [Hkv, length, D].

    Both are multiples of the page size, and the row has room for them all.
    """
    heads, _, size, dim = pages.shape
    if consecutive:
        first = table[row, 0] + start // size
        return jax.lax.dynamic_slice(pages, (0, first, 0, 0), (heads, length // size, size, dim)).reshape(
            heads, length, dim
        )
    ids = jax.lax.dynamic_slice(table, (row, start // size), (1, length // size))[0]
    return pages[:, ids].reshape(heads, length, dim)


def selected_view(pages: jax.Array, table: jax.Array, selection: jax.Array) -> jax.Array:
    """The selected pages of every row, compact: [Hkv, B, k * page_size, D].

    Args:
      pages: [Hkv, pages, page_size, D].
      table: page table [B, P].
      selection: positions in the page table [B, k], or for each KV head [B, Hkv, k]; negative entries read page 0 and
        must be masked by the caller.
    """
    heads, _, size, dim = pages.shape
    batch, k = selection.shape[0], selection.shape[-1]
    if selection.ndim == 3:
        ids = jnp.take_along_axis(table[:, None], jnp.maximum(selection, 0), axis=2)
        own = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
        return pages[own, ids].swapaxes(0, 1).reshape(heads, batch, k * size, dim)
    ids = jnp.take_along_axis(table, jnp.maximum(selection, 0), axis=1)
    return pages[:, ids.reshape(-1)].reshape(heads, batch, k * size, dim)


def write(leaves: Leaves, new: Leaves, page: jax.Array, offset: jax.Array) -> Leaves:
    """Writes packed tokens' keys or values into their pages; tokens whose page is out of range are dropped.

    Args:
      leaves: the cache's k or v.
      new: per layer [T, Hkv, D], or stacked [L, T, Hkv, D].
      page, offset: [T] page in the pool and place in the page.
    """
    if isinstance(leaves, tuple):
        return tuple(
            old.at[:, page, offset].set(jnp.swapaxes(n, 0, 1).astype(old.dtype), mode="drop")
            for old, n in zip(leaves, new, strict=True)
        )
    assert isinstance(new, jax.Array)
    return leaves.at[:, :, page, offset].set(jnp.swapaxes(new, 1, 2).astype(leaves.dtype), mode="drop")
