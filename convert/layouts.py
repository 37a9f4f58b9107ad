"""Foreign matrices to the fused leaves of `aspire_jax.params`, and back.

Foreign heads lie in the order of the query heads, `group` of them to a key-value head, so a query projection's
rows are [Hkv, G, D]. Params want them grouped by key-value head with its key and value behind.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aspire_jax.config import ModelConfig

Parts = dict[str, np.ndarray]

# Leaf of a layer -> the foreign parts it is made of.
LAYER_LEAVES: dict[str, tuple[str, ...]] = {
    "attn_norm": ("attn_norm",),
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "mlp_norm": ("mlp_norm",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "o_bias": ("o_bias",),
    "q_norm": ("q_norm",),
    "k_norm": ("k_norm",),
}


def pack(config: ModelConfig, leaf: str, parts: list[np.ndarray]) -> np.ndarray:
    """One layer's `leaf` from the foreign `parts` that `LAYER_LEAVES` names. The result is contiguous."""
    c = config
    if leaf in ("qkv", "qkv_bias"):
        heads = [part.reshape(c.n_kv_heads, -1, c.head_dim, *part.shape[1:]) for part in parts]
        rows = np.concatenate(heads, axis=1)  # [Hkv, G + 2, D, d_model], or without the last axis for the biases
        if leaf == "qkv_bias":
            return rows
        return transposed(rows.reshape(-1, c.d_model)).reshape(c.d_model, c.n_kv_heads, c.group + 2, c.head_dim)
    if leaf == "gate_up":
        out = np.empty((c.d_model, 2, c.d_ff), parts[0].dtype)
        for index, part in enumerate(parts):
            transpose_into(out[:, index], part)
        return out
    if leaf == "o":
        return transposed(parts[0]).reshape(c.n_kv_heads, c.group, c.head_dim, c.d_model)
    if leaf == "down":
        return transposed(parts[0])
    return parts[0]


def unpack(config: ModelConfig, leaf: str, value: np.ndarray) -> list[np.ndarray]:
    """The foreign parts of one layer's `leaf`; the inverse of `pack`."""
    c = config
    if leaf in ("qkv", "qkv_bias"):
        wide = value.shape[:-3]  # (d_model,), or () for the biases
        rows = transposed(value.reshape(c.d_model, -1)) if wide else value
        rows = rows.reshape(c.n_kv_heads, c.group + 2, c.head_dim, *wide)
        return [part.reshape(-1, *wide) for part in (rows[:, : c.group], rows[:, -2], rows[:, -1])]
    if leaf == "gate_up":
        return [transposed(value[:, 0]), transposed(value[:, 1])]
    if leaf == "o":
        return [transposed(value.reshape(-1, c.d_model))]
    if leaf == "down":
        return [transposed(value)]
    return [value]


def transpose_into(out: np.ndarray, matrix: np.ndarray) -> None:
    """`out[...] = matrix.T`, a few rows at a time: five times faster than numpy's own order of large copies."""
    rows = 16
    for start in range(0, matrix.shape[0], rows):
        out[:, start : start + rows] = matrix[start : start + rows].T


def transposed(matrix: np.ndarray) -> np.ndarray:
    """A contiguous copy of `matrix.T`."""
    out = np.empty(matrix.shape[::-1], matrix.dtype)
    transpose_into(out, matrix)
    return out


def unpermute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Undoes the row order that GGUF gives Llama's query and key projections [n_heads * D, ...].

    GGUF interleaves a head's two halves (its runtimes rotate neighbouring pairs); the published checkpoints,
    and this package, rotate the first half against the second.
    """
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])  # [heads, D / 2, half, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def llama_gguf_fix(config: ModelConfig) -> Callable[[str, np.ndarray], np.ndarray]:
    """What to do to a part read from a GGUF of `config`: only Llama's queries and keys are permuted."""
    heads = {"q": config.n_heads, "k": config.n_kv_heads} if config.family == "llama" else {}

    def fix(role: str, value: np.ndarray) -> np.ndarray:
        n_heads = heads.get(role.removesuffix("_bias"))
        return value if n_heads is None else unpermute(value, n_heads)

    return fix
