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
    c, dtype = config, parts[0].dtype
    if leaf in ("qkv", "qkv_bias"):
        wide = parts[0].shape[1:]  # (d_model,), or () for the biases
        out = np.empty((*wide, c.n_kv_heads, c.group + 2, c.head_dim), dtype)
        q, k, v = (np.moveaxis(p.reshape(c.n_kv_heads, -1, c.head_dim, *wide), -1, 0) if wide else
                   p.reshape(c.n_kv_heads, -1, c.head_dim) for p in parts)  # fmt: skip
        out[..., : c.group, :], out[..., c.group : -1, :], out[..., -1:, :] = q, k, v
        return out
    if leaf == "gate_up":
        out = np.empty((c.d_model, 2, c.d_ff), dtype)
        out[:, 0], out[:, 1] = parts[0].T, parts[1].T
        return out
    if leaf == "o":
        return np.ascontiguousarray(parts[0].T).reshape(c.n_kv_heads, c.group, c.head_dim, c.d_model)
    if leaf == "down":
        return np.ascontiguousarray(parts[0].T)
    return parts[0]


def unpack(config: ModelConfig, leaf: str, value: np.ndarray) -> list[np.ndarray]:
    """The foreign parts of one layer's `leaf`; the inverse of `pack`. Views, not copies, where possible."""
    c = config
    if leaf in ("qkv", "qkv_bias"):
        q, k, v = value[..., : c.group, :], value[..., c.group : -1, :], value[..., -1:, :]
        if leaf == "qkv_bias":
            return [p.reshape(-1) for p in (q, k, v)]
        return [np.moveaxis(p, 0, -1).reshape(-1, c.d_model) for p in (q, k, v)]
    if leaf == "gate_up":
        return [value[:, 0].T, value[:, 1].T]
    if leaf == "o":
        return [value.reshape(-1, c.d_model).T]
    if leaf == "down":
        return [value.T]
    return [value]


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
