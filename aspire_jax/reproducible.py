"""Arithmetic of one width: a token's result depends on the token alone, to the last bit.

Floating-point sums depend on their order, and the order on the width of a product, on where a block of keys is cut, on
what a compiler fuses. With `Engine.reproducible` none of these depends on what else a step holds:

  products        always over WIDTH tokens, in as many turns as a step has tokens; each turn stands between barriers, in
                  a loop body of its own, so that the compiler sees the same piece of program in every engine
  attention       keys in blocks of `block_of` tokens, cut at absolute positions of the row; a new token's key stands at
                  its position whether it is committed already or verified in the same step (attention/reproducible.py)
  prefill         chunks at absolute positions of the prompt, the same products and blocks

What remains is a property of the backend, which the tests check: within one product of fixed shape, a column's result
depends neither on its place nor on the other columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Tokens a product takes. Products on a CPU climb stairs of 16 columns, so less would spare nothing.
WIDTH = 16
# Keys of a block, at most; a row's capacity is whole blocks.
_BLOCK = 512

# A function of arrays with a leading axis of tokens, applied to all of a step's tokens.
Across = Callable[..., Any]


def block_of(page_size: int) -> int:
    """Keys of a block: whole pages."""
    return max(1, _BLOCK // page_size) * page_size


def at_once(f: Callable[..., Any], *arrays: Any) -> Any:
    """`f` of all tokens together: the `Across` of steps whose width is free."""
    return f(*arrays)


def by_width(count: jax.Array, width: int = WIDTH) -> Across:
    """An `Across` that takes `width` tokens at a time, and no more turns than `count` tokens need.

    Args:
      count: tokens that count, scalar int32; results of later ones may be zero.
      width: divides the arrays' leading axis.
    """

    def across(f: Callable[..., Any], *arrays: Any) -> Any:
        tokens = jax.tree.leaves(arrays)[0].shape[0]
        assert tokens % width == 0

        def part(i: jax.Array) -> Any:
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * width, width), arrays)

        def turn(i: jax.Array, done: Any) -> Any:
            made = jax.lax.optimization_barrier(f(*jax.lax.optimization_barrier(part(i))))
            return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * width, 0), done, made)

        made = jax.eval_shape(lambda: f(*part(jnp.int32(0))))
        empty = jax.tree.map(lambda x: jnp.zeros((tokens, *x.shape[1:]), x.dtype), made)
        # The number of turns is not known to the compiler: a loop of one would be dissolved into its surroundings.
        return jax.lax.fori_loop(0, (count + width - 1) // width, turn, empty)

    return across
