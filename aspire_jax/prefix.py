"""Prompts that begin alike: what another slot already holds of a prompt is copied from there, not computed again.

Whole chunks only, or the same prompt as a whole: so every chunk was computed with the very content that it has in this
prompt, and the copy has the bits that the prompt's own prefill would have produced. Completions of one request share
their whole prompt, questions about one document all of it but its last chunk.
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
      A slot, and a multiple of `chunk`, or N where the slot holds just this prompt.
    """
    found = [usable(prompt, tokens, chunk) for tokens in held]
    best = max(range(len(held)), key=lambda i: (found[i], i == slot))
    return best, found[best]


def copy(engine: Engine, state: State, source: jax.Array, slot: jax.Array, count: jax.Array) -> State:
    """Copies keys and values of one slot's first `count` tokens to another's, in whole pages.

    Args:
      source, slot: scalars int32; `slot` must not be active.
      count: scalar int32. For the bits of the prompt's own prefill: whole chunks of those that were prefilled into
        `source` (generated tokens are none), or all of them.
    """
    table = state.slots.table

    def page(i: jax.Array, cache: kv.KVCache) -> kv.KVCache:
        def one(x: jax.Array) -> jax.Array:  # [..., pages, page_size, D]
            axis = x.ndim - 3
            found = jax.lax.dynamic_index_in_dim(x, table[source, i], axis)
            return jax.lax.dynamic_update_index_in_dim(x, found, table[slot, i], axis)

        return jax.tree.map(one, cache)

    pages = (count + engine.page_size - 1) // engine.page_size
    return dataclasses.replace(state, cache=jax.lax.fori_loop(0, pages, page, state.cache))


def usable(prompt: np.ndarray, held: np.ndarray, chunk: int) -> int:
    """How many tokens of a prompt can be had from a slot that holds `held`; see `longest`."""
    least = min(len(prompt), len(held))
    differs = np.flatnonzero(prompt[:least] != held[:least])
    common = int(differs[0]) if len(differs) else least
    return common if common == len(prompt) == len(held) else common // chunk * chunk
