"""Foreign tensor names to parts of a layer group, by pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from aspire_jax.config import ModelConfig
from aspire_jax.errors import InputError
from convert.tensors import Tensor


class Part(NamedTuple):
    """What a foreign tensor is: `role` ("q", "embed", "gate_bias") and its layer, or None outside the layers."""

    role: str
    layer: int | None


_HF_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "unembed": "lm_head.weight"}
_HF_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GGUF_TOP = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "unembed": "output.weight"}
_GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


class Naming:
    """One foreign naming scheme, usable both ways."""

    def __init__(self, top: Mapping[str, str], layer: Mapping[str, str], prefix: str, ignored: str) -> None:
        self._top, self._layer, self._prefix = top, layer, prefix
        self._of_top = {name: role for role, name in top.items()}
        self._of_layer = {name: role for role, name in layer.items()}
        self._pattern = re.compile(re.escape(prefix) + r"\.(0|[1-9]\d*)\.(.+)")
        self._ignored = re.compile(ignored)

    def name(self, part: Part) -> str:
        """The foreign name of `part`."""
        if part.layer is None:
            return self._top[part.role]
        return f"{self._prefix}.{part.layer}.{self._layer[part.role]}"

    def part(self, name: str) -> Part | None:
        """What the foreign `name` stands for; None where it is unknown."""
        if name in self._of_top:
            return Part(self._of_top[name], None)
        match = self._pattern.fullmatch(name)
        if match and match[2] in self._of_layer:
            return Part(self._of_layer[match[2]], int(match[1]))
        return None

    def ignored(self, name: str) -> bool:
        """Whether `name` holds nothing that the config does not say already."""
        return self._ignored.fullmatch(name) is not None


# Old Llama checkpoints carry a buffer of rotary frequencies; GGUF carries llama3's divisors, read with the config.
HF = Naming(_HF_TOP, _HF_LAYER, "model.layers", r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
GGUF = Naming(_GGUF_TOP, _GGUF_LAYER, "blk", r"rope_freqs\.weight")


def foreign_shapes(config: ModelConfig) -> dict[Part, tuple[int, ...]]:
    """Every part a source of `config` must hold with its shape, in the order a checkpoint is written.

    Foreign matrices are [out, in], the transpose of what this package multiplies with.
    """
    c = config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.d_model,),
        "q": (q, c.d_model),
        "k": (kv, c.d_model),
        "v": (kv, c.d_model),
        "o": (c.d_model, q),
        "mlp_norm": (c.d_model,),
        "gate": (c.d_ff, c.d_model),
        "up": (c.d_ff, c.d_model),
        "down": (c.d_model, c.d_ff),
    }
    if c.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if c.o_bias:
        layer |= {"o_bias": (c.d_model,)}
    if c.qk_norm:
        layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    shapes: dict[Part, tuple[int, ...]] = {Part("embed", None): (c.vocab_size, c.d_model)}
    for index in range(c.n_layers):
        shapes |= {Part(role, index): shape for role, shape in layer.items()}
    shapes[Part("final_norm", None)] = (c.d_model,)
    if not c.tie_embeddings:
        shapes[Part("unembed", None)] = (c.vocab_size, c.d_model)
    return shapes


def match(config: ModelConfig, naming: Naming, tensors: Mapping[str, Tensor], source: str) -> dict[Part, Tensor]:
    """Every part of `config` with its tensor, all shapes checked.

    A tied model may carry its output projection a second time; it is left out here (`duplicate_unembed`).

    Raises:
      InputError: an unknown or missing tensor, or a wrong shape; names file and tensor.
    """
    want = foreign_shapes(config)
    found: dict[Part, Tensor] = {}
    for name, tensor in tensors.items():
        if naming.ignored(name):
            continue
        part = naming.part(name)
        if part is None or (part not in want and part != Part("unembed", None)):
            raise InputError(f"{tensor.file}: tensor {name} is unknown to a {config.family} model of this config")
        found[part] = tensor
    for part, shape in want.items():
        if part not in found:
            raise InputError(f"{source}: tensor {naming.name(part)} is missing, expected shape {list(shape)}")
        tensor = found[part]
        if tensor.shape != shape:
            raise InputError(
                f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
    return {part: found[part] for part in want}
