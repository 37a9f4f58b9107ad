"""Hugging Face's config.json to a `ModelConfig` and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aspire_jax.config import ModelConfig, RopeConfig
from aspire_jax.errors import InputError
from convert.fields import Fields, read_json

CONFIG = "config.json"
GENERATION = "generation_config.json"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")

# What transformers assumes where a config.json is silent.
_DEFAULT_LENGTH = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "mistral": 131072}
_DEFAULT_TOKENS = {"llama": (1, 2), "mistral": (1, 2)}
_CLASS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def read_hf_config(folder: Path) -> ModelConfig:
    """The model that `folder`/config.json describes; generation_config.json adds its end tokens where present.

    Raises:
      InputError: not JSON, a missing or ill-typed field, or a model that this package does not run.
    """
    file = folder / CONFIG
    f = Fields(file, read_json(file))
    family = f.text("model_type")
    if family not in FAMILIES:
        raise f.fail("model_type", f"one of {', '.join(FAMILIES)}")
    _refuse_variants(f, family)
    d_model, n_heads = f.size("hidden_size"), f.size("num_attention_heads")
    head_dim = f.size("head_dim", 128 if family == "qwen3" else max(1, d_model // n_heads))
    if f.get("head_dim") is None and family != "qwen3" and d_model % n_heads:
        raise f.fail("hidden_size", f"a multiple of num_attention_heads ({n_heads}), or head_dim")
    bias = f.flag("attention_bias", False)
    length = f.size("max_position_embeddings", _DEFAULT_LENGTH[family])
    rope, length = _read_rope(f, length)
    bos, eos = _read_tokens(folder, f, family)
    try:
        return ModelConfig(
            family=family,
            vocab_size=f.size("vocab_size"),
            d_model=d_model,
            n_layers=f.size("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=f.size("num_key_value_heads", 8 if family == "mistral" else n_heads),
            head_dim=head_dim,
            d_ff=f.size("intermediate_size"),
            norm_eps=f.number("rms_norm_eps", 1e-6),
            max_length=length,
            tie_embeddings=f.flag("tie_word_embeddings", False),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2" or (bias and family in ("llama", "qwen3")),
            o_bias=bias and family in ("llama", "qwen3"),
            rope=rope,
            bos_id=bos,
            eos_ids=eos,
        )
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{file}: {error}") from error


def _refuse_variants(f: Fields, family: str) -> None:
    """Refuses by name what a config of a known family can ask for and this package does not compute."""
    activation = f.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise f.fail("hidden_act", "silu")
    f.refuse("mlp_bias", False, "a bias in the MLP")
    f.refuse("quantization_config", None, "a quantised Hugging Face checkpoint")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        f.refuse(key, 0, "a mixture of experts")
    f.refuse("partial_rotary_factor", 1.0, "a rotary embedding over a part of the head")
    f.refuse("no_rope_layers", [], "a layer without rotary embedding")
    types = f.get("layer_types")
    if types is not None and (not isinstance(types, list) or set(types) - {"full_attention"}):
        raise f.fail("layer_types", "full_attention in every layer (sliding windows are not supported)")
    window = f.get("sliding_window")
    if family in ("qwen2", "qwen3"):
        window = window if f.flag("use_sliding_window", False) else None
    elif family == "mistral" and "sliding_window" not in f.values:
        window = 4096  # what transformers assumes where the field is absent
    if window is not None:
        length = f.size("max_position_embeddings", _DEFAULT_LENGTH[family])
        first = f.size("max_window_layers", 28) if family in ("qwen2", "qwen3") else 0
        if first >= f.size("num_hidden_layers"):
            return  # the layers that would use the window begin after the last one
        if isinstance(window, bool) or not isinstance(window, int) or window < length:
            raise InputError(
                f"{f.file}: sliding_window is {window!r}, expected null or at least max_position_embeddings "
                f"({length}): attention over a sliding window is not supported"
            )


def _read_rope(f: Fields, length: int) -> tuple[RopeConfig, int]:
    """The rotary embedding and the model's maximum length.

    Older configs say rope_theta and rope_scaling, newer ones put both into rope_parameters.
    """
    key = "rope_parameters" if f.get("rope_parameters") is not None else "rope_scaling"
    values = f.get(key) if f.get(key) is not None else {}
    if not isinstance(values, dict):
        raise f.fail(key, "an object")
    if any(isinstance(value, dict) for value in values.values()):
        raise f.fail(key, "one rotary embedding for all layers")
    r = Fields(f.file, values, f"{key}.")
    theta = r.number("rope_theta", f.number("rope_theta", 10_000.0))
    kind = r.text("rope_type", r.text("type", "default"))
    r.refuse("partial_rotary_factor", 1.0, "a rotary embedding over a part of the head")
    if kind == "default":
        return RopeConfig(theta=theta), length
    if kind not in ("linear", "llama3", "yarn"):
        raise r.fail("rope_type" if r.get("rope_type") is not None else "type", "default, linear, llama3 or yarn")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=_factor(r)), length
    outer = f.get("original_max_position_embeddings")
    original = (
        r.size("original_max_position_embeddings", length)
        if outer is None
        else f.size("original_max_position_embeddings")
    )
    if kind == "llama3":
        low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
        if high <= low:
            raise r.fail("high_freq_factor", f"more than low_freq_factor ({low})")
        rope = RopeConfig(
            kind="llama3", theta=theta, factor=_factor(r), original_max_length=original,
            low_freq_factor=low, high_freq_factor=high,
        )  # fmt: skip
        return rope, length
    factor = length / original if r.get("factor") is None else _factor(r)
    rope = RopeConfig(
        kind="yarn",
        theta=theta,
        factor=max(factor, 1.0),
        original_max_length=original,
        beta_fast=r.number("beta_fast", 32.0),
        beta_slow=r.number("beta_slow", 1.0),
        attention_factor=r.optional_number("attention_factor"),
        mscale=r.optional_number("mscale") if r.get("mscale") else None,
        mscale_all_dim=r.optional_number("mscale_all_dim") if r.get("mscale_all_dim") else None,
        truncate=r.flag("truncate", True),
    )
    # Yarn is switched on by adding it to a config that still states the length without it.
    return rope, max(length, int(original * rope.factor))


def _factor(r: Fields) -> float:
    if r.number("factor") < 1.0:
        raise r.fail("factor", "a number of at least 1")
    return r.number("factor")


def _read_tokens(folder: Path, f: Fields, family: str) -> tuple[int | None, tuple[int, ...]]:
    """Beginning token and every end token of config.json and generation_config.json, in that order."""
    bos, eos = _DEFAULT_TOKENS.get(family, (None, None))
    begins = f.ids("bos_token_id") if "bos_token_id" in f.values else (() if bos is None else (bos,))
    ends = f.ids("eos_token_id") if "eos_token_id" in f.values else (() if eos is None else (eos,))
    if (folder / GENERATION).is_file():
        ends += Fields(folder / GENERATION, read_json(folder / GENERATION)).ids("eos_token_id")
    return (begins[0] if begins else None), tuple(dict.fromkeys(ends))


def write_hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json, as an object, that `read_hf_config` reads back to `config`."""
    c = config
    values: dict[str, Any] = {
        "architectures": [_CLASS[c.family]],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.d_ff,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_length,
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": c.bos_id,
        "eos_token_id": list(c.eos_ids) if len(c.eos_ids) != 1 else c.eos_ids[0],
        "torch_dtype": dtype,
        "rope_theta": c.rope.theta,
        "rope_scaling": _write_rope(c.rope),
    }
    if not c.eos_ids:
        values["eos_token_id"] = None
    if c.family in ("llama", "qwen3"):
        values["attention_bias"] = c.o_bias
    if c.family == "mistral":
        values["sliding_window"] = None
    return values


def _write_rope(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    named: dict[str, Any] = {"factor": rope.factor}
    if rope.kind == "llama3":
        named |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        keys = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        named |= {key: getattr(rope, key) for key in keys}
    if rope.original_max_length is not None:
        named["original_max_position_embeddings"] = rope.original_max_length
    return {"rope_type": rope.kind, **{key: value for key, value in named.items() if value is not None}}
