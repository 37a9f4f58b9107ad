"""Signals of a draft: what a draft-length policy may learn of the token a row just drafted, where it asks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.attention.softmax import by_page
from aspire_jax.draft_length import Signals


def unknown(batch: int) -> Signals:
    """Signals of rows that made no draft."""
    return Signals(*jnp.full((len(Signals._fields), batch), np.nan, jnp.float32))


def measure(
    asked: tuple[str, ...], logits: jax.Array, token: jax.Array, outside: jax.Array | None, drafting: jax.Array
) -> Signals:
    """The signals in `asked`; NaN for the others and for rows that do not draft.

    Args:
      logits: [B, V] float32, those of each row's draft.
      token: [B] the draft.
      outside: [B] (see `Signals`), None where no layer measured it.
      drafting: [B] bool.
    """
    found = unknown(drafting.shape[0])._asdict()
    is_draft = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == token[:, None]
    if "margin" in asked:
        best, second = (jnp.max(jnp.where(mask, -jnp.inf, logits), axis=-1) for mask in (~is_draft, is_draft))
        found["margin"] = best - second
    if "top_probability" in asked or "entropy" in asked:
        log_p = jax.nn.log_softmax(logits, axis=-1)
        if "top_probability" in asked:
            found["top_probability"] = jnp.exp(jnp.max(jnp.where(is_draft, log_p, -jnp.inf), axis=-1))
        if "entropy" in asked:
            found["entropy"] = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    if "outside" in asked and outside is not None:
        found["outside"] = outside
    return Signals(*(jnp.where(drafting, x, np.float32(np.nan)) for x in found.values()))


def outside_of(weights: jax.Array, selection: jax.Array, page_size: int) -> jax.Array:
    """Share of attention [B] on committed tokens outside the selection, mean over queries and query heads.

    Args:
      weights: [B, Q, Hkv, G, S] softmax weights of committed tokens.
      selection: [B, k] selected pages, -1 where unused; [B, Hkv, k] where each KV head has its own.
    """
    if selection.ndim == 2:
        weights, selection = jnp.mean(weights, axis=2, keepdims=True), selection[:, None]
    mean = jnp.mean(weights, axis=(1, 3))  # [B, Hkv, S], or one for all heads
    pages = by_page(mean, page_size)
    inside = jnp.take_along_axis(pages, jnp.maximum(selection, 0), axis=2)
    inside = jnp.sum(jnp.where(selection >= 0, inside, np.float32(0.0)), axis=2)
    # By rounding the selected pages may hold a little more than all of them.
    return jnp.mean(jnp.maximum(jnp.sum(pages, axis=2) - inside, np.float32(0.0)), axis=1)
