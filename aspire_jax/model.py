"""The transformer's arithmetic, free of any cache: what happens to packed tokens [T] before and after attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import rope
from aspire_jax.config import ModelConfig
from aspire_jax.params import Params
from aspire_jax.reproducible import Across

# Products accumulate in float32 whatever the params' dtype; on the CPU and for float32 that is exact float32.
_PRECISION = jax.lax.Precision.HIGHEST


# With fewer tokens than this a product gains by its weights on the left (18 % at 64, 6 % at 128, none at 256).
_FEW_TOKENS = 192


def linear(layer: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    """`x` [T, inputs] through the projection `name` of one layer: [T, outputs] in x's dtype, accumulated in float32."""
    if f"{name}_t" in layer:
        return _left_product(layer[f"{name}_t"], x).astype(x.dtype)
    w = layer[name]
    y = jnp.einsum("ti,io->to", x, w.reshape(x.shape[1], -1), precision=_PRECISION, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _left_product(w: jax.Array, x: jax.Array) -> jax.Array:
    """`x` [T, inputs] times `w` [outputs, inputs] transposed: [T, outputs], float32."""
    if x.shape[0] >= _FEW_TOKENS:
        return jnp.einsum("ti,oi->to", x, w, precision=_PRECISION, preferred_element_type=jnp.float32)
    # Turned around behind a barrier both times: folded into the product either costs a CPU half its speed.
    columns = jax.lax.optimization_barrier(x.T)
    y = jnp.einsum("oi,it->ot", w, columns, precision=_PRECISION, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y).T


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32. `scale`: [x.shape[-1]]."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + np.float32(eps))
    return y.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def project(
    config: ModelConfig, layer: dict[str, jax.Array], x: jax.Array, cos_sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [T, Hkv, G, D], keys [T, Hkv, D] and values [T, Hkv, D] of one layer, rotated.

    Args:
      layer: one layer's params (no leading layers axis).
      x: residual stream [T, d_model].
      cos_sin: `rope.rotation` at the tokens' positions [2, T, D / 2].
    """
    c, t = config, x.shape[0]
    h = rms_norm(x, layer["attn_norm"], c.norm_eps)
    qkv = linear(layer, "qkv", h).reshape(t, c.n_kv_heads, c.group + 2, c.head_dim)
    if c.qkv_bias:
        qkv = qkv + layer["qkv_bias"][None]
    q, k, v = qkv[:, :, : c.group], qkv[:, :, c.group], qkv[:, :, c.group + 1]
    q = q.reshape(t, c.n_heads, c.head_dim)
    if c.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], c.norm_eps), rms_norm(k, layer["k_norm"], c.norm_eps)
    q, k = rope.rotate(q, cos_sin), rope.rotate(k, cos_sin)
    return q.reshape(t, c.n_kv_heads, c.group, c.head_dim), k, v


def finish(config: ModelConfig, layer: dict[str, jax.Array], x: jax.Array, attended: jax.Array) -> jax.Array:
    """Output projection, residuals and the gated MLP. `attended`: [T, Hkv, G, D]. Returns [T, d_model]."""
    c, t = config, x.shape[0]
    y = linear(layer, "o", attended.reshape(t, -1).astype(x.dtype))
    x = x + (y + layer["o_bias"][None] if c.o_bias else y)
    h = rms_norm(x, layer["mlp_norm"], c.norm_eps)
    gate, up = jnp.split(linear(layer, "gate_up", h), 2, axis=-1)
    return x + linear(layer, "down", jax.nn.silu(gate) * up)


def unembed(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Logits [T, vocab_size], float32, of the residual stream `x` [T, d_model]."""
    table = params["embed"] if config.tie_embeddings else params["unembed"]
    h = rms_norm(x, params["final_norm"], config.norm_eps)
    return _left_product(table, h)


class Tokenwise(NamedTuple):
    """The functions above on a step's tokens, taken all at once or a fixed number at a time (see `reproducible`).

    Attributes:
      config: the model's.
      across: applies a function of arrays with a leading axis of tokens.
    """

    config: ModelConfig
    across: Across

    def rotation(self, positions: jax.Array) -> jax.Array:
        """cos and sin at `positions` [T], token by token: [T, 2, D / 2]."""
        c = self.config
        return self.across(
            lambda at: jnp.moveaxis(rope.rotation(c.rope, c.head_dim, c.max_length, at), 1, 0), positions
        )

    def project(
        self, layer: dict[str, jax.Array], x: jax.Array, rotation: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `project`."""
        return self.across(lambda x, turn: project(self.config, layer, x, jnp.moveaxis(turn, 1, 0)), x, rotation)

    def finish(self, layer: dict[str, jax.Array], x: jax.Array, attended: jax.Array) -> jax.Array:
        """See `finish`."""
        return self.across(lambda x, y: finish(self.config, layer, x, y), x, attended)

    def unembed(self, params: Params, x: jax.Array) -> jax.Array:
        """See `unembed`."""
        return self.across(lambda x: unembed(self.config, params, x), x)


def layer_of(params: Params, index: int | jax.Array) -> dict[str, jax.Array]:
    """One layer's params: out of a list (`params.unstack`), or out of stacked ones by a static or traced index."""
    layers: Any = params["layers"]
    if isinstance(layers, list):
        return layers[index]
    if isinstance(index, int):
        return {name: w[index] for name, w in layers.items()}
    return {name: jax.lax.dynamic_index_in_dim(w, index, keepdims=False) for name, w in layers.items()}


def through_layers(
    one: Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]], x: jax.Array, start: int, stop: int
) -> tuple[jax.Array, Any]:
    """`one` of (x, layer) for layers [start, stop) as one loop: the last x, and what each layer made, stacked.

    A `while_loop` over a counter, in place of a scan over layer numbers, and the counter is the first thing it carries:
    so XLA's GPU compiler knows on the host which layer a turn is about, and products read a layer's weights where they
    lie (see `programs.compiler_options`).
    """

    def turn(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, x, every = carry
        x, made = one(x, i + start)
        return i + 1, x, jax.tree.map(lambda all_layers, new: all_layers.at[i].set(new), every, made)

    _, made = jax.eval_shape(one, x, jnp.int32(start))
    every = jax.tree.map(lambda y: jnp.zeros((stop - start, *y.shape), y.dtype), made)
    _, x, every = jax.lax.while_loop(lambda carry: carry[0] < stop - start, turn, (jnp.int32(0), x, every))
    return x, every


def dense_logits(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits [T, vocab_size] of one sequence `tokens` [T] by plain causal attention, without a cache.

    The reference the engine is compared with; memory grows with T squared.
    """
    t = tokens.shape[0]
    positions = jnp.arange(t)
    cos_sin = rope.rotation(config.rope, config.head_dim, config.max_length, positions)
    causal = positions[:, None] >= positions[None, :]

    def step(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q, k, v = project(config, layer, x, cos_sin)
        scores = jnp.einsum("qhgd,khd->hgqk", q, k, precision=_PRECISION, preferred_element_type=jnp.float32)
        scores = jnp.where(causal[None, None], scores * np.float32(config.head_dim**-0.5), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        attended = jnp.einsum("hgqk,khd->qhgd", weights, v.astype(jnp.float32), precision=_PRECISION)
        return finish(config, layer, x, attended), None

    x, _ = jax.lax.scan(step, params["embed"][tokens], params["layers"])
    return unembed(config, params, x)
