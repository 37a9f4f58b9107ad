"""Rotary position embedding: inverse frequencies of every scaling, and the rotation.

Sources: RoFormer (arXiv 2104.09864), linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), the
Llama 3.1 release for "llama3". Conventions are those of the published checkpoints: a head's first half is
rotated against its second half.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_length: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [head_dim / 2], float32, and the factor that scales cos and sin.

    Raises:
      ValueError: a kind this function does not know.
    """
    plain = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return plain.astype(np.float32), 1.0
    if rope.kind == "linear":
        return (plain / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain, max_length).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim, max_length).astype(np.float32), _yarn_scale(rope)
    raise ValueError(f"rope kind {rope.kind!r}, expected default, linear, llama3 or yarn")


def _llama3(rope: RopeConfig, plain: np.ndarray, max_length: int) -> np.ndarray:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    rotations = (rope.original_max_length or max_length) * plain / (2 * math.pi)
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int, max_length: int) -> np.ndarray:
    """Dimensions that turn often over the original context are kept, those that turn rarely interpolated."""
    original = rope.original_max_length or max_length

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 * (low == high)  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(m: float) -> float:
        return 0.1 * m * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def rotation(rope: RopeConfig, head_dim: int, max_length: int, positions: jax.Array) -> jax.Array:
    """cos and sin at `positions` [...]: float32 [2, ..., head_dim / 2]."""
    frequencies, scale = inverse_frequencies(rope, head_dim, max_length)
    axes = (1,) * positions.ndim
    angle = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies).reshape(*axes, -1)
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)]) * np.float32(scale)


def rotate(x: jax.Array, cos_sin: jax.Array) -> jax.Array:
    """Rotates heads `x` [T, heads, head_dim] by `cos_sin` [2, T, head_dim / 2]; keeps x's dtype."""
    cos, sin = cos_sin[0][:, None, :], cos_sin[1][:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
