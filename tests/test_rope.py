"""Rotary frequencies of every scaling, against their definitions and, where torch is installed, transformers."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import rope
from aspire_jax.config import RopeConfig

LLAMA3 = RopeConfig(
    kind="llama3", theta=5e5, factor=8.0, original_max_length=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = RopeConfig(kind="yarn", theta=1e6, factor=4.0, original_max_length=32768)


def test_default_is_a_geometric_series() -> None:
    frequencies, scale = rope.inverse_frequencies(RopeConfig(theta=10000.0), 8, 64)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert scale == 1.0 and frequencies.dtype == np.float32


def test_linear_divides() -> None:
    plain, _ = rope.inverse_frequencies(RopeConfig(), 64, 64)
    scaled, scale = rope.inverse_frequencies(RopeConfig(kind="linear", factor=4.0), 64, 64)
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)
    assert scale == 1.0


def test_llama3_bands() -> None:
    plain, _ = rope.inverse_frequencies(RopeConfig(theta=5e5), 128, 131072)
    scaled, scale = rope.inverse_frequencies(LLAMA3, 128, 131072)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.any() and np.all((plain / 8 < scaled)[between] & (scaled < plain)[between])
    assert scale == 1.0


def test_yarn_keeps_fast_dimensions_and_scales_attention() -> None:
    plain, _ = rope.inverse_frequencies(RopeConfig(theta=1e6), 128, 131072)
    scaled, scale = rope.inverse_frequencies(YARN, 128, 131072)
    assert scaled[0] == plain[0]
    np.testing.assert_allclose(scaled[-1], plain[-1] / 4, rtol=1e-6)
    assert scale == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"attention_factor": 1.25}, 1.25),
        ({"factor": 1.0}, 1.0),
        ({"mscale": 1.0}, 0.1 * math.log(4) + 1),  # both are needed
        ({"mscale": 0.5, "mscale_all_dim": 1.5}, (0.05 * math.log(4) + 1) / (0.15 * math.log(4) + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(fields: dict[str, Any], expected: float) -> None:
    config = RopeConfig(**{"kind": "yarn", "factor": 4.0, "original_max_length": 32, **fields})
    assert rope.inverse_frequencies(config, 16, 128)[1] == pytest.approx(expected)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="rope kind 'ntk', expected default, linear, llama3 or yarn"):
        rope.inverse_frequencies(RopeConfig(kind="ntk"), 8, 64)  # type: ignore[arg-type]


def test_rotation_preserves_length_and_depends_on_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 32)), jnp.float32) for _ in range(2))

    def score(i: int, j: int) -> float:
        at = [rope.rotation(RopeConfig(), 32, 4096, jnp.asarray([p])) for p in (i, j)]
        return float(jnp.vdot(rope.rotate(q, at[0]), rope.rotate(k, at[1])))

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-3)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2
    turned = rope.rotate(q, rope.rotation(RopeConfig(), 32, 4096, jnp.asarray([55])))
    assert float(jnp.linalg.norm(turned)) == pytest.approx(float(jnp.linalg.norm(q)), rel=1e-5)


def test_halves_rotate_against_each_other() -> None:
    x = jnp.zeros((1, 1, 4)).at[0, 0, 0].set(1.0)  # first half's first dimension, frequency 1
    turned = rope.rotate(x, rope.rotation(RopeConfig(), 4, 64, jnp.asarray([1])))
    np.testing.assert_allclose(turned[0, 0], [math.cos(1), 0, math.sin(1), 0], atol=1e-6)


def test_rotate_keeps_the_dtype() -> None:
    x = jnp.ones((2, 3, 8), jnp.bfloat16)
    assert rope.rotate(x, rope.rotation(RopeConfig(), 8, 64, jnp.arange(2))).dtype == jnp.bfloat16


@pytest.mark.parametrize("positions", [jnp.arange(5), jnp.arange(6).reshape(2, 3), jnp.asarray(3)])
def test_rotation_shape(positions: Any) -> None:
    assert rope.rotation(YARN, 16, 64, positions).shape == (2, *positions.shape, 8)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (RopeConfig(theta=5e5), {"rope_type": "default"}),
        (RopeConfig(kind="linear", theta=5e5, factor=2.5), {"rope_type": "linear", "factor": 2.5}),
        (
            LLAMA3,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (
            RopeConfig(kind="yarn", theta=5e5, factor=4.0, original_max_length=4096),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
        (
            RopeConfig(
                kind="yarn", theta=5e5, factor=40.0, original_max_length=4096, beta_fast=20.0, beta_slow=2.0,
                mscale=0.707, mscale_all_dim=1.0, truncate=False,
            ),
            {
                "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 20.0,
                "beta_slow": 2.0, "mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False,
            },
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn-mscale"],
)  # fmt: skip
def test_frequencies_equal_transformers(config: RopeConfig, parameters: dict[str, Any], head_dim: int) -> None:
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=163840,
        rope_parameters={"rope_theta": 5e5, **parameters},
    )
    reference = LlamaRotaryEmbedding(theirs)
    frequencies, scale = rope.inverse_frequencies(config, head_dim, 163840)
    np.testing.assert_allclose(frequencies, reference.inv_freq.numpy(), rtol=2e-6)
    assert scale == pytest.approx(reference.attention_scaling, rel=1e-6)
