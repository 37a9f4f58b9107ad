"""What the end of a prompt attends to, for context policies that choose once, after prefill.

A pass of its own over the prompt's last tokens: prefill stays as fast as it is for the policies that do not ask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import cache as kv
from aspire_jax import model, rope
from aspire_jax.attention import xla
from aspire_jax.attention.softmax import Partial, attend, log_sum_exp, merge, normalise, scores_of
from aspire_jax.context import PromptWeights
from aspire_jax.engine import Engine, State
from aspire_jax.params import Params


def observe_prompt(
    engine: Engine, params: Params, state: State, slot: jax.Array, tokens: jax.Array, count: jax.Array
) -> State:
    """Measures the attention of a prompt's last tokens and hands it to the context policy; nothing else changes.

    Args:
      state: the request was admitted to `slot`, and no step was made since.
      slot: scalar int32.
      tokens: [plan.prompt_window] int32, the prompt's last tokens up to its very last, padded behind `count`.
      count: tokens that count, scalar int32; fewer than the window where the prompt is shorter.
    """
    c, window = engine.config, tokens.shape[0]
    table = state.slots.table
    start = state.slots.length[slot] + 1 - count
    place = jnp.arange(window, dtype=jnp.int32)
    cos_sin = rope.rotation(c.rope, c.head_dim, c.max_length, start + place)
    among = (place[:, None] >= place[None, :]) & (place < count)[None]
    before = (jnp.arange(engine.capacity, dtype=jnp.int32) < start)[None, None]
    counts = (place < count)[None, :, None, None]

    def row(leaves: kv.Leaves, layer: int | jax.Array) -> jax.Array:
        pages = kv.leaf(leaves, layer)
        return kv.block_view(pages, table, engine.consecutive, slot, jnp.int32(0), engine.capacity)  # [Hkv, S, D]

    def one(x: jax.Array, layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = model.layer_of(params, layer)
        q, k, v = model.project(c, weights, x, cos_sin)
        keys, values = row(state.cache.k, layer), row(state.cache.v, layer)
        columns = xla.heads_first(q[None])[:, 0]  # [Hkv, window * G, D]
        far = Partial(*(y[0] for y in xla.rows_first(_one_row(attend(columns, keys, values, before)), window)))
        part = merge(far, xla.over_new(q, k, v, among))
        lse = log_sum_exp(part).swapaxes(0, 1).reshape(c.n_kv_heads, -1, 1)
        attended = jnp.where(before, jnp.exp(scores_of(columns, keys) - lse), np.float32(0.0))
        attended = attended.reshape(c.n_kv_heads, window, c.group, -1)
        total = jnp.sum(jnp.where(counts, attended, np.float32(0.0)), axis=(1, 2))
        mean = total / (count * c.group).astype(jnp.float32)
        return model.finish(c, weights, x, normalise(part)), mean

    x = params["embed"][tokens]
    if engine.unrolled:
        rows = []
        for layer in range(c.n_layers):
            x, mean = one(x, layer)
            rows.append(mean)
        measured = jnp.stack(rows)
    else:
        _, measured = model.through_layers(one, x, 0, c.n_layers)
    policy: Any = engine.context
    is_row = jnp.arange(engine.batch) == slot
    return dataclasses.replace(
        state, context=policy.observe_prompt(state.context, PromptWeights(is_row, start, measured))
    )


def window_of(prompt: np.ndarray, window: int) -> tuple[np.ndarray, int]:
    """The last `window` tokens of a prompt, padded behind, and how many of them count."""
    last = np.asarray(prompt[-window:], np.int32)
    return np.pad(last, (0, window - len(last))), len(last)


def _one_row(part: Partial) -> Partial:
    """A partial over [Hkv, N] as one over [Hkv, 1, N]."""
    return Partial(*(x[:, None] for x in part))
