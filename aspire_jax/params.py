"""One description of the parameters; abstract, random and sharded trees all come from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from aspire_jax.config import ModelConfig

Params = dict[str, Any]

# Logical axis -> mesh axis. Heads, hidden units and vocabulary split; everything else is replicated.
TENSOR_PARALLEL: Mapping[str, str] = {"kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


class Leaf(NamedTuple):
    """One parameter: its shape, the logical name of each axis, and the fan-in its random init divides by."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fan_in: int | None  # None: a norm's scale (ones) or a bias (zeros)


def describe(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree of `config` with a `Leaf` at every position.

    Layers are stacked along a leading axis. Query, key and value projections are one matrix, grouped by
    key-value head (its `group` queries, then its key, then its value), so that splitting `kv_heads` splits all
    three; gate and up are one matrix. Fewer, larger products are what decoding wants.
    """
    c, g = config, config.group
    embed, norm = ("vocab", "embed"), ("layers", "embed")
    layers = {
        "attn_norm": Leaf((c.n_layers, c.d_model), norm, None),
        "qkv": Leaf(
            (c.n_layers, c.d_model, c.n_kv_heads, g + 2, c.head_dim),
            ("layers", "embed", "kv_heads", "qkv", "head_dim"),
            c.d_model,
        ),
        "o": Leaf(
            (c.n_layers, c.n_kv_heads, g, c.head_dim, c.d_model),
            ("layers", "kv_heads", "group", "head_dim", "embed"),
            c.n_heads * c.head_dim,
        ),
        "mlp_norm": Leaf((c.n_layers, c.d_model), norm, None),
        "gate_up": Leaf((c.n_layers, c.d_model, 2, c.d_ff), ("layers", "embed", "gate_up", "mlp"), c.d_model),
        "down": Leaf((c.n_layers, c.d_ff, c.d_model), ("layers", "mlp", "embed"), c.d_ff),
    }
    if c.qkv_bias:
        axes = ("layers", "kv_heads", "qkv", "head_dim")
        layers["qkv_bias"] = Leaf((c.n_layers, c.n_kv_heads, g + 2, c.head_dim), axes, None)
    if c.o_bias:
        layers["o_bias"] = Leaf((c.n_layers, c.d_model), norm, None)
    if c.qk_norm:
        layers["q_norm"] = Leaf((c.n_layers, c.head_dim), ("layers", "head_dim"), None)
        layers["k_norm"] = Leaf((c.n_layers, c.head_dim), ("layers", "head_dim"), None)
    tree = {
        "embed": Leaf((c.vocab_size, c.d_model), embed, c.d_model),
        "layers": layers,
        "final_norm": Leaf((c.d_model,), ("embed",), None),
    }
    if not c.tie_embeddings:
        tree["unembed"] = Leaf((c.vocab_size, c.d_model), embed, c.d_model)
    return tree


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def count(config: ModelConfig) -> int:
    """Number of parameters (a tied output projection counts once)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(describe(config), is_leaf=_is_leaf))


def abstract(config: ModelConfig, dtype: DTypeLike, shardings: Any = None) -> Params:
    """The tree of `jax.ShapeDtypeStruct`s a checkpoint must match; `shardings` as `shardings()` returns them."""
    tree = describe(config)
    if shardings is None:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree, is_leaf=_is_leaf)
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=s), tree, shardings, is_leaf=_is_leaf
    )


# Projections by the number of leading axes that are the product's input, behind the layers axis.
_MATRICES = {"qkv": 1, "o": 3, "gate_up": 1, "down": 1}


def unstack(params: Params) -> Params:
    """The same params with `layers` as a list of dicts, one a layer, their matrices laid out for streaming.

    What the engine's unrolled layers read: no slice of a stacked array to copy, and each projection as one matrix
    [outputs, inputs] under its name with "_t" behind it. As the left operand of a product with few columns such a
    matrix is read about twice as fast on a CPU as [inputs, outputs] on the right.
    """
    stacked: dict[str, jax.Array] = params["layers"]
    depth = next(iter(stacked.values())).shape[0]
    layers = []
    for i in range(depth):
        layer = {}
        for name, w in stacked.items():
            if name in _MATRICES:
                inputs = math.prod(w.shape[1 : 1 + _MATRICES[name]])
                layer[f"{name}_t"] = _transposed(w[i].reshape(inputs, -1))
            else:
                layer[name] = w[i]
        layers.append(layer)
    return {**params, "layers": layers}


@jax.jit
def _transposed(matrix: jax.Array) -> jax.Array:
    return matrix.T


def shardings(config: ModelConfig, mesh: Mesh, rules: Mapping[str, str] = TENSOR_PARALLEL) -> Any:
    """A tree of `NamedSharding`s on `mesh`.

    An axis whose size the mesh axis does not divide stays replicated.
    """

    def spec(leaf: Leaf) -> NamedSharding:
        names = [rules.get(axis or "") for axis in leaf.axes]
        fits = [
            n if n in mesh.shape and size % mesh.shape[n] == 0 else None
            for n, size in zip(names, leaf.shape, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*fits))

    return jax.tree.map(spec, describe(config), is_leaf=_is_leaf)


def random(config: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random params: normal with variance 1/fan_in, norm scales one, biases zero. `key`: a typed PRNG key."""
    paths, tree = jax.tree.flatten_with_path(describe(config), is_leaf=_is_leaf)
    keys = jax.random.split(key, len(paths))

    def draw(path: Any, leaf: Leaf, k: jax.Array) -> jax.Array:
        if leaf.fan_in is None:
            fill = 0.0 if str(path[-1].key).endswith("bias") else 1.0
            return jnp.full(leaf.shape, fill, dtype)
        return (jax.random.normal(k, leaf.shape, jnp.float32) * leaf.fan_in**-0.5).astype(dtype)

    return jax.tree.unflatten(tree, [draw(p, leaf, k) for (p, leaf), k in zip(paths, keys, strict=True)])
