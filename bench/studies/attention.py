"""What every layer attends to behind a prompt, token by token: plain attention over a sequence, without a cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import model, rope
from aspire_jax.config import ModelConfig
from aspire_jax.loading import Model

# Queries at a time: what bounds memory.
_BLOCK = 128


class Attention(NamedTuple):
    """Attention to the whole pages of a prompt by the tokens behind it; L layers, W tokens, P pages.

    Attributes:
      by_head: [L, W, Hkv, P] softmax weight of each page, mean over the query heads of each KV head.
      score: [L, W, P] ASPIRE's score: the largest weight over all heads, summed over a page's tokens.
      window: [L, Hkv, S] weights of the prompt's tokens, mean over the prompt's last tokens and a KV head's query
        heads; zero from `start` on. What SnapKV looks at.
      start: position of the first of those last tokens.
    """

    by_head: np.ndarray
    score: np.ndarray
    window: np.ndarray
    start: int

    @property
    def mass(self) -> np.ndarray:
        """[L, W, P] softmax weight of each page, mean over all heads."""
        return self.by_head.mean(axis=2)


def measured(loaded: Model, prompt: np.ndarray, answer: np.ndarray, page_size: int, window: int) -> Attention:
    """The attention of an answer's tokens to its prompt.

    Args:
      prompt: its tokens; those beyond whole pages are attended to but not part of what is measured.
      answer: tokens that followed it, at least one.
      window: last tokens of the prompt that `Attention.window` is the mean of.
    """
    c = loaded.config
    tokens = np.concatenate([prompt, answer]).astype(np.int32)
    padded = np.pad(tokens, (0, -len(tokens) % _BLOCK))
    pages, start = len(prompt) // page_size, max(len(prompt) - window, 0)
    behind, last = (np.arange(*ends, dtype=np.int32) for ends in ((len(prompt), len(tokens)), (start, len(prompt))))
    cos_sin = rope.rotation(c.rope, c.head_dim, c.max_length, jnp.arange(len(padded)))
    x = loaded.params["embed"][padded]
    by_head, score, seen = [], [], []
    for layer in range(c.n_layers):
        x, q, k = _layer(c, model.layer_of(loaded.params, layer), x, cos_sin)
        weights = np.asarray(_weights(q[behind], k, behind))[..., : pages * page_size]
        cut = weights.reshape(*weights.shape[:-1], pages, page_size)  # [W, Hkv, G, P, page_size]
        by_head.append(cut.sum(axis=-1).mean(axis=2))
        score.append(cut.max(axis=(1, 2)).sum(axis=-1))
        of_last = np.asarray(_weights(q[last], k, last)).mean(axis=(0, 2))[:, : len(prompt)]
        seen.append(np.where(np.arange(len(prompt))[None] < start, of_last, 0.0))
    return Attention(np.stack(by_head), np.stack(score), np.stack(seen).astype(np.float32), start)


@functools.partial(jax.jit, static_argnums=0)
def _layer(
    c: ModelConfig, weights: dict[str, jax.Array], x: jax.Array, cos_sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The residual stream behind one layer [T, d_model], the layer's queries [T, Hkv, G, D] and its keys."""
    q, k, v = model.project(c, weights, x, cos_sin)
    place = jnp.arange(x.shape[0], dtype=jnp.int32)

    def block(of: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.einsum("qhgs,shd->qhgd", _weights(*of[:1], k, of[1]), v.astype(jnp.float32))

    blocks = (q.reshape(-1, _BLOCK, *q.shape[1:]), place.reshape(-1, _BLOCK))
    attended = jax.lax.map(block, blocks).reshape(q.shape)
    return model.finish(c, weights, x, attended), q, k


@jax.jit
def _weights(q: jax.Array, k: jax.Array, place: jax.Array) -> jax.Array:
    """Causal softmax weights [Q, Hkv, G, S], float32, of queries [Q, Hkv, G, D] at positions `place` [Q]."""
    scores = jnp.einsum("qhgd,shd->qhgs", q, k, preferred_element_type=jnp.float32)
    causal = place[:, None] >= jnp.arange(k.shape[0], dtype=jnp.int32)[None]
    scores = jnp.where(causal[:, None, None], scores * np.float32(q.shape[-1] ** -0.5), -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)
