"""The k best pages of each row, without a sort. One program a row.

Bisection on the ranks' bits finds the k-th largest, a running count packs what lies above it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import Implementation, call, power_of_two

# A program holds a row's ranks in registers; rows of more pages than this are left to XLA's sort.
MOST_PAGES = 16_384
_RANKS_OF_THREAD = 32


def select_pages(rank: jax.Array, budget: jax.Array, *, capacity: int, implementation: Implementation) -> jax.Array:
    """The highest-ranking pages of each row, up to its budget; of equals the first.

    Args:
      rank: [..., P] float32; infinity comes before all scores, what is negative may not be selected.
      budget: pages to select [...] int32.
      capacity: most pages, at most P.

    Returns:
      [..., capacity] int32 in no particular order, -1 where unused.
    """
    pages = rank.shape[-1]
    if implementation == "xla" or pages > MOST_PAGES:
        return _twin(rank, budget, capacity)
    if capacity == 0 or budget.size == 0:
        return jnp.zeros((*budget.shape, capacity), jnp.int32)
    chosen = call(
        _kernel,
        jax.ShapeDtypeStruct((budget.size, capacity), jnp.int32),
        (budget.size,),
        *(rank.reshape(-1, pages), budget.reshape(-1)),
        implementation=implementation,
        name="select_pages",
        warps=min(max(power_of_two(pages) // (32 * _RANKS_OF_THREAD), 8), 16),
    )
    return chosen.reshape(*budget.shape, capacity)


def _kernel(rank: Any, budget: Any, out: Any) -> None:
    row = pl.program_id(0)
    capacity = out.shape[1]
    index = jnp.arange(power_of_two(rank.shape[1]), dtype=jnp.int32)
    score = plt.load(rank.at[row, index], mask=index < rank.shape[1], other=-1.0)
    # Non-negative floats order like their bits.
    bits = jnp.where(score >= 0, jnp.maximum(jax.lax.bitcast_convert_type(score, jnp.int32), 0), -1)
    wanted = jnp.minimum(jnp.minimum(budget[row], capacity), jnp.sum((bits >= 0).astype(jnp.int32)))

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


def _twin(rank: jax.Array, budget: jax.Array, capacity: int) -> jax.Array:
    best, chosen = jax.lax.top_k(rank, capacity)
    place = jax.lax.broadcasted_iota(jnp.int32, best.shape, best.ndim - 1)
    return jnp.where((place < budget[..., None]) & (best >= 0), chosen, -1).astype(jnp.int32)
