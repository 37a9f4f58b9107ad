"""One description of the parameters, from which every tree comes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from aspire_jax import params
from aspire_jax.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    d_model=64,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    head_dim=16,
    d_ff=128,
    norm_eps=1e-5,
    max_length=64,
    tie_embeddings=False,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "biases": {"qkv_bias": True, "o_bias": True},
    "qk_norm": {"qk_norm": True},
}


@pytest.fixture(params=list(VARIANTS))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return dataclasses.replace(CONFIG, **VARIANTS[request.param])


def test_every_leaf_names_every_axis(config: ModelConfig) -> None:
    leaves = jax.tree.leaves(params.describe(config), is_leaf=lambda node: isinstance(node, params.Leaf))
    assert all(len(leaf.shape) == len(leaf.axes) for leaf in leaves)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == params.count(config)


def test_abstract_and_random_agree(config: ModelConfig) -> None:
    drawn = params.random(config, jax.random.key(1), jnp.bfloat16)
    abstract = params.abstract(config, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), drawn) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)


def test_random_params_have_unit_gain(config: ModelConfig) -> None:
    drawn = params.random(config, jax.random.key(2))
    gate_up = np.asarray(drawn["layers"]["gate_up"])
    assert gate_up.std() * config.d_model**0.5 == pytest.approx(1.0, rel=0.02)
    assert not np.array_equal(gate_up[0], gate_up[1])
    assert np.all(np.asarray(drawn["final_norm"]) == 1)
    if config.qkv_bias:
        assert not np.asarray(drawn["layers"]["qkv_bias"]).any()


def test_random_params_follow_the_key(config: ModelConfig) -> None:
    first, again, other = (params.random(config, jax.random.key(seed)) for seed in (3, 3, 4))
    assert np.array_equal(first["embed"], again["embed"])
    assert not np.array_equal(first["embed"], other["embed"])


def test_shardings_split_heads_hidden_units_and_vocabulary(config: ModelConfig) -> None:
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.tree.map(lambda sharding: sharding.spec, params.shardings(config, mesh))
    assert specs["embed"] == P("tensor", None)
    assert specs["layers"]["qkv"] == P(None, None, "tensor", None, None)
    assert specs["layers"]["o"] == P(None, "tensor", None, None, None)
    assert specs["layers"]["down"] == P(None, "tensor", None)
    assert specs["layers"]["attn_norm"] == P(None, None)


def test_what_does_not_divide_is_replicated() -> None:
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    odd = dataclasses.replace(CONFIG, n_heads=3, n_kv_heads=3, vocab_size=97)
    specs = jax.tree.map(lambda sharding: sharding.spec, params.shardings(odd, mesh))
    assert specs["layers"]["qkv"] == P(None, None, None, None, None)
    assert specs["embed"] == P(None, None)
    assert specs["layers"]["down"] == P(None, "tensor", None)


def test_abstract_carries_shardings() -> None:
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = params.shardings(CONFIG, mesh)
    abstract = params.abstract(CONFIG, jnp.float32, shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, abstract) == shardings


def test_config_survives_json() -> None:
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_length=32, mscale=0.7, mscale_all_dim=1.0, truncate=False)
    config = dataclasses.replace(CONFIG, rope=rope, eos_ids=(1, 2), bos_id=0)
    assert ModelConfig.from_json(config.to_json()) == config
    assert hash(ModelConfig.from_json(config.to_json())) == hash(config)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"rope": {}, "eos_ids": []}', '{"rope": 3, "eos_ids": []}'])
def test_json_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a config of this version"):
        ModelConfig.from_json(text)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"n_layers": 0}, "n_layers: 0, expected a positive whole number"),
        ({"d_model": 2.0}, "d_model: 2.0"),
        ({"vocab_size": True}, "vocab_size: True"),
        ({"n_kv_heads": 3}, "n_heads: 8, expected a multiple of n_kv_heads"),
        ({"head_dim": 7}, "head_dim: 7, expected an even number"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected.replace("(", r"\(")):
        dataclasses.replace(CONFIG, **change)
