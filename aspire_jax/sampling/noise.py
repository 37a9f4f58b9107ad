"""Noise as a function of a seed and a position: the same wherever and whenever it is asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# What else is drawn at a token's position, besides the noise of the token itself.
DRAFT, ACCEPT = 1, 2


def keys_at(seeds: jax.Array, position: jax.Array) -> jax.Array:
    """Random keys [T] of the tokens at `position` [T] in sequences with `seeds` [T, 2] uint32."""
    wrapped = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(wrapped, position)


def purpose(keys: jax.Array, number: int) -> jax.Array:
    """Keys [T] for another use at the same positions."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, np.uint32(number))


def gumbel(keys: jax.Array, vocabulary: int) -> jax.Array:
    """Standard Gumbel noise [T, vocabulary] float32.

    From all 32 bits: the usual 23 leave steps of a percent among the largest of 50,000 values, and those win.
    """
    bits = jax.vmap(lambda key: jax.random.bits(key, (vocabulary,), jnp.uint32))(keys)
    # In (0, 1), finest near 0, where -log(1 - v) is small and the noise is large.
    v = bits.astype(jnp.float32) * np.float32(2**-32) + np.float32(2**-33)
    v = jnp.minimum(v, np.float32(1 - 2**-24))
    return -jnp.log(-jnp.log1p(-v))


def uniform(keys: jax.Array) -> jax.Array:
    """One uniform number [T] float32 in [0, 1) for each key."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)
