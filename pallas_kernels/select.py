"""The k best pages of each row, without a sort. One program a row.

Bisection on the scores' bits finds the k-th largest, a running count packs what lies above it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import Implementation, call, power_of_two

# Bits of +inf as an integer: above every finite score. Non-negative floats order like their bits.
_ALWAYS = np.int32(0x7F800000)


def select_pages(
    mass: jax.Array,
    pages: jax.Array,
    budget: jax.Array,
    *,
    recent: int,
    capacity: int,
    implementation: Implementation,
) -> jax.Array:
    """The `recent` last pages of each row, and the highest-scoring others up to its budget; of equals the first.

    Args:
      mass: page scores [B, P] float32, not negative.
      pages: pages in use [B] int32; budget: pages to select [B] int32, at most `capacity`.

    Returns:
      [B, capacity] int32 in no particular order, -1 where unused.
    """
    if implementation == "xla":
        return _twin(mass, pages, budget, recent, capacity)
    if capacity == 0:
        return jnp.zeros((mass.shape[0], 0), jnp.int32)
    return call(
        functools.partial(_kernel, recent=recent),
        jax.ShapeDtypeStruct((mass.shape[0], capacity), jnp.int32),
        (mass.shape[0],),
        *(mass, pages, budget),
        implementation=implementation,
        name="select_pages",
        warps=8,
    )


def _kernel(mass: Any, pages: Any, budget: Any, out: Any, *, recent: int) -> None:
    row = pl.program_id(0)
    capacity = out.shape[1]
    index = jnp.arange(power_of_two(mass.shape[1]), dtype=jnp.int32)
    inside = index < jnp.minimum(pages[row], mass.shape[1])
    score = plt.load(mass.at[row, jnp.where(inside, index, 0)], mask=inside, other=0.0)
    bits = jnp.maximum(jax.lax.bitcast_convert_type(score, jnp.int32), 0)
    bits = jnp.where(inside, jnp.where(index >= pages[row] - recent, _ALWAYS, bits), -1)
    wanted = jnp.minimum(jnp.minimum(budget[row], capacity), pages[row])

    def narrow(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.int32(1) << (30 - i))
        enough = jnp.sum((bits >= candidate).astype(jnp.int32)) >= wanted
        return jnp.where(enough, candidate, found)

    threshold = jax.lax.fori_loop(0, 31, narrow, jnp.int32(0))
    above = bits > threshold
    tied = bits == threshold
    left = wanted - jnp.sum(above.astype(jnp.int32))
    taken = (wanted > 0) & (above | (tied & (jnp.cumsum(tied.astype(jnp.int32)) <= left)))
    # Masked entries get places of their own: the interpreter writes an old value back where a store is masked.
    place = jnp.where(taken, jnp.cumsum(taken.astype(jnp.int32)) - 1, capacity + index)
    plt.store(out.at[row, place], index, mask=taken)
    slot = jnp.arange(power_of_two(capacity), dtype=jnp.int32)
    unused = (slot >= wanted) & (slot < capacity)
    plt.store(out.at[row, slot], jnp.full_like(slot, -1), mask=unused)


def _twin(mass: jax.Array, pages: jax.Array, budget: jax.Array, recent: int, capacity: int) -> jax.Array:
    index = jnp.arange(mass.shape[1], dtype=jnp.int32)[None]
    inside = index < pages[:, None]
    always = index >= (pages - recent)[:, None]
    rank = jnp.where(inside, jnp.where(always, np.float32(np.inf), mass), np.float32(-1.0))
    best, chosen = jax.lax.top_k(rank, capacity)
    used = (jnp.arange(capacity)[None] < budget[:, None]) & (best >= 0)
    return jnp.where(used, chosen, -1).astype(jnp.int32)
