"""A step's keys and values go into their pages, in place. One program per (token, layer).

XLA's scatter is in place too, but it runs an element at a time under an index check of its own; here a program copies
a token's keys and values of all KV heads of a layer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.launch import Implementation, call, power_of_two


def write_pages(
    k: jax.Array,
    v: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    *,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """The cache with packed tokens written to their places; donate it.

    Args:
      k, v: [L, Hkv, pages, page_size, D].
      new_k, new_v: [L, T, Hkv, D].
      page, offset: [T] int32, all places different; a token whose page or offset is out of range is dropped.
    """
    if implementation == "xla":
        # An index from the end is none: drop it like those beyond.
        place = jnp.where((page >= 0) & (offset >= 0), page, k.shape[2])
        return tuple(
            old.at[:, :, place, jnp.maximum(offset, 0)].set(jnp.swapaxes(new, 1, 2).astype(old.dtype), mode="drop")
            for old, new in ((k, new_k), (v, new_v))
        )  # type: ignore[return-value]
    return call(
        _kernel,
        (jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        (page.shape[0], k.shape[0]),
        *(page, offset, new_k, new_v, k, v),
        implementation=implementation,
        name="write_pages",
        aliases={4: 0, 5: 1},
    )


def _kernel(page: Any, offset: Any, new_k: Any, new_v: Any, _k: Any, _v: Any, k: Any, v: Any) -> None:
    token, layer = pl.program_id(0), pl.program_id(1)
    heads, pages, page_size, dim = k.shape[1:]
    to, slot = page[token], offset[token]

    @pl.when((to >= 0) & (to < pages) & (slot >= 0) & (slot < page_size))
    def _work() -> None:
        head = jnp.arange(power_of_two(heads), dtype=jnp.int32)[:, None]
        d = jnp.arange(power_of_two(dim), dtype=jnp.int32)[None]
        mask = (head < heads) & (d < dim)
        for new, old in ((new_k, k), (new_v, v)):
            value = plt.load(new.at[layer, token, head, d], mask=mask, other=0)
            plt.store(old.at[layer, head, to, slot, d], value.astype(old.dtype), mask=mask)
