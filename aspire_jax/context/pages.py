"""Choosing pages: what the policies have in common."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from aspire_jax.context.policy import Room


def pages_of(lengths: jax.Array, page_size: int) -> jax.Array:
    """Pages that hold `lengths` tokens."""
    return (lengths + page_size - 1) // page_size


def top_pages(
    mass: jax.Array,
    inside: jax.Array,
    first: jax.Array,
    budget: jax.Array,
    capacity: int,
    kernels: pk.Implementation = "xla",
) -> jax.Array:
    """Pages up to a budget: those that come first whatever their score, then the highest-scoring others.

    Args:
      mass: page scores [..., P], not negative; of equal ones the earlier page wins.
      inside: pages that may be selected [..., P] bool.
      first: pages that come first [..., P] bool.
      budget: pages to select [...].
      capacity: most pages; places that are not needed stay unused.
      kernels: as `Room.kernels`.

    Returns:
      [..., capacity] int32 in no particular order, -1 where unused.
    """
    rank = jnp.where(inside, jnp.where(first, np.float32(np.inf), mass), np.float32(-1.0))
    return pk.select_pages(rank, budget, capacity=capacity, implementation=kernels)


def best_pages(
    mass: jax.Array,
    pages: jax.Array,
    budget: jax.Array,
    recent: int,
    capacity: int,
    kernels: pk.Implementation = "xla",
) -> jax.Array:
    """The `recent` last pages of each row, and the highest-scoring others up to its budget.

    Args:
      mass: page scores [B, P], or [..., B, P] for several selections of the same rows.
      pages: pages in use [B].
      budget: pages to select [B], at most `capacity`.
      kernels: as `Room.kernels`.

    Returns:
      [..., B, capacity] int32 in no particular order, -1 where unused.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, mass.shape, mass.ndim - 1)
    end = jnp.broadcast_to(pages[:, None], mass.shape[-2:]).reshape((1,) * (mass.ndim - 2) + mass.shape[-2:])
    wanted = jnp.broadcast_to(budget.reshape((1,) * (mass.ndim - 2) + budget.shape), mass.shape[:-1])
    return top_pages(mass, index < end, index >= end - recent, wanted, capacity, kernels)


def always(lengths: jax.Array, room: Room, sinks: int, recent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which pages are in use, and which of them are always read.

    Args:
      lengths: committed tokens [B].
      sinks: first tokens to read, in whole pages.
      recent: last pages to read [B]; the last one counts, however few tokens it holds yet.

    Returns:
      Two masks [B, P] bool.
    """
    index = jnp.arange(room.pages, dtype=jnp.int32)[None]
    pages = pages_of(lengths, room.page_size)[:, None]
    inside = index < pages
    return inside, inside & ((index < room.pages_for(sinks)) | (index >= pages - recent[:, None]))
