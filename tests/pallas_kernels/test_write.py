"""Writing a step's keys and values, every implementation against assignments in a loop."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

from .plain import EVERY, jitted


@EVERY
@pytest.mark.parametrize(("heads", "dim", "dtype"), [(2, 16, "float32"), (3, 20, "bfloat16"), (1, 64, "float16")])
def test_every_token_goes_to_its_place_and_nowhere_else(heads: int, dim: int, dtype: str, implementation: str) -> None:
    layers, pool, size, tokens = 2, 6, 4, 9
    rng = np.random.default_rng(dim)

    def random(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)

    k, v = random(layers, heads, pool, size, dim), random(layers, heads, pool, size, dim)
    new = random(layers, tokens, heads, dim), random(layers, tokens, heads, dim)
    places = rng.permutation(pool * size)[:tokens]
    page, offset = (places // size).astype(np.int32), (places % size).astype(np.int32)
    page[2], page[5], offset[7] = pool, -1, size  # dropped
    call = jitted(pk.write_pages, implementation=implementation)
    got = call(k, v, *new, jnp.asarray(page), jnp.asarray(offset))
    for before, added, after in zip((k, v), new, got, strict=True):
        want = np.asarray(before).copy()
        for t in range(tokens):
            if t not in (2, 5, 7):
                want[:, :, page[t], offset[t]] = np.asarray(added)[:, t]
        assert np.array_equal(after, want)
