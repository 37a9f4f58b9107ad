"""Prompts that begin alike: what another slot already holds of a prompt is copied from there, not computed again.

Whole chunks only, so that every chunk is computed with the same neighbours as if the prompt were alone: the copy has
the very bits that the prompt's own prefill would have produced. Completions of one request share their whole prompt,
questions about one document all but the last chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from aspire_jax import cache as kv
from aspire_jax.engine import Engine, State


def longest(prompt: np.ndarray, held: Sequence[np.ndarray], slot: int, chunk: int) -> tuple[int, int]:
    """The slot that holds most of a prompt's beginning, and how many of its tokens can be had from there.

    Args:
      prompt: [N] tokens to prefill.
      held: of each slot the tokens that were prefilled into it last; empty where there are none.
      slot: the one that the prompt goes to; of equals it wins, since nothing needs copying there.
      chunk: tokens that are prefilled at a time.

    Returns:
      A slot, and a multiple of `chunk` or all of N.
    """
    found = [_usable(prompt, tokens, chunk) for tokens in held]
    best = max(range(len(held)), key=lambda i: (found[i], i == slot))
    return best, found[best]


def copy(engine: Engine, state: State, source: jax.Array, slot: jax.Array, count: jax.Array) -> State:
    """Copies keys and values of one slot's first `count` tokens to another's, in whole pages; scalars int32."""
    table = state.slots.table

    def page(i: jax.Array, cache: kv.KVCache) -> kv.KVCache:
        def one(x: jax.Array) -> jax.Array:  # [..., pages, page_size, D]
            axis = x.ndim - 3
            found = jax.lax.dynamic_index_in_dim(x, table[source, i], axis)
            return jax.lax.dynamic_update_index_in_dim(x, found, table[slot, i], axis)

        return jax.tree.map(one, cache)

    pages = (count + engine.page_size - 1) // engine.page_size
    return dataclasses.replace(state, cache=jax.lax.fori_loop(0, pages, page, state.cache))


def _usable(prompt: np.ndarray, held: np.ndarray, chunk: int) -> int:
    least = min(len(prompt), len(held))
    differs = np.flatnonzero(prompt[:least] != held[:least])
    common = int(differs[0]) if len(differs) else least
    return common if common == len(prompt) else common // chunk * chunk
