"""GGUF metadata to a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aspire_jax import rope as rope_lib
from aspire_jax.config import ModelConfig, RopeConfig
from aspire_jax.errors import InputError
from convert.fields import Fields
from convert.gguf_file import GgufFile

# Mistral's models are stored as "llama".
ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"

_CHAT_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")
_CONTROL = 3  # GGUF's type number of a control token

# (original length, low, high) of every published Llama 3.x; tried before fitting.
_LLAMA3 = (8192, 1.0, 4.0)


def gguf_config(gguf: GgufFile) -> ModelConfig:
    """The model that the file's metadata describes.

    Raises:
      InputError: a missing or ill-typed field, or a model that this package does not run.
    """
    top = Fields(gguf.path, gguf.metadata)
    arch = top.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise top.fail("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
    if top.get("split.count") not in (None, 0, 1):
        raise top.fail("split.count", "a GGUF in one file (merge the parts first)")
    prefix = f"{arch}."
    f = Fields(gguf.path, {k.removeprefix(prefix): v for k, v in gguf.metadata.items() if k.startswith(prefix)}, prefix)
    f.refuse("expert_count", 0, "a mixture of experts")
    length = f.size("context_length")
    window = f.get("attention.sliding_window")
    if window is not None and not (isinstance(window, int) and (window == 0 or window >= length)):
        raise f.fail("attention.sliding_window", f"at least context_length ({length}): sliding windows unsupported")
    d_model, n_heads = f.size("embedding_length"), f.size("attention.head_count")
    head_dim = f.size("attention.key_length", max(1, d_model // n_heads))
    f.refuse("attention.value_length", head_dim, "a value head of another size than the key head")
    f.refuse("rope.dimension_count", head_dim, "a rotary embedding over a part of the head")
    rope, length = _rope(gguf, f, head_dim, length)
    embed = gguf.tensors.get("token_embd.weight")
    if embed is None:
        raise InputError(f"{gguf.path}: tensor token_embd.weight is missing")
    bos = top.ids("tokenizer.ggml.bos_token_id")
    try:
        return ModelConfig(
            family=arch,
            vocab_size=embed.shape[0],
            d_model=d_model,
            n_layers=f.size("block_count"),
            n_heads=n_heads,
            n_kv_heads=f.size("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            d_ff=f.size("feed_forward_length"),
            # Stored as float32: 1e-5 reads back as 9.999999747378752e-06.
            norm_eps=float(f"{f.number('attention.layer_norm_rms_epsilon'):.6g}"),
            max_length=length,
            tie_embeddings="output.weight" not in gguf.tensors,
            qk_norm=arch == "qwen3",
            qkv_bias="blk.0.attn_q.bias" in gguf.tensors,
            o_bias="blk.0.attn_output.bias" in gguf.tensors,
            rope=rope,
            bos_id=bos[0] if bos else None,
            eos_ids=_end_tokens(top),
        )
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{gguf.path}: {error}") from error


def _end_tokens(f: Fields) -> tuple[int, ...]:
    """The end tokens that the metadata names, and the chat markers it may forget (a base model's eos is another)."""
    ends = [i for key in ("eos", "eot", "eom") for i in f.ids(f"tokenizer.ggml.{key}_token_id")]
    tokens, types = f.get("tokenizer.ggml.tokens"), f.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        ends += [i for i, (token, kind) in pairs if kind == _CONTROL and token in _CHAT_ENDS]
    return tuple(dict.fromkeys(ends))


def _rope(gguf: GgufFile, f: Fields, head_dim: int, length: int) -> tuple[RopeConfig, int]:
    theta = f.number("rope.freq_base", 10_000.0)
    kind = f.text("rope.scaling.type", "linear" if f.get("rope.scale_linear") is not None else "none")
    if ROPE_FACTORS in gguf.tensors:
        if kind not in ("none", "linear") or f.number("rope.scaling.factor", 1.0) != 1.0:
            raise f.fail("rope.scaling.type", f"none beside the tensor {ROPE_FACTORS}")
        return _llama3(gguf, theta, head_dim), length
    if kind == "none":
        return RopeConfig(theta=theta), length
    if kind == "linear":
        factor = f.number("rope.scaling.factor", f.number("rope.scale_linear", 1.0))
        return RopeConfig(kind="linear" if factor != 1 else "default", theta=theta, factor=factor), length
    if kind != "yarn":
        raise f.fail("rope.scaling.type", "none, linear or yarn")
    f.refuse("rope.scaling.yarn_log_multiplier", 0.0, "this scale of attention")
    f.refuse("rope.scaling.yarn_ext_factor", 1.0, "an extrapolation mix")
    for key in ("attn_factor", "yarn_attn_factor"):
        f.refuse(f"rope.scaling.{key}", 1.0, "this scale of attention")
    original = f.size("rope.scaling.original_context_length", length)
    rope = RopeConfig(
        kind="yarn",
        theta=theta,
        factor=f.number("rope.scaling.factor"),
        original_max_length=original,
        beta_fast=f.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=f.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    return rope, max(length, int(original * rope.factor))


def _llama3(gguf: GgufFile, theta: float, head_dim: int) -> RopeConfig:
    """The llama3 scaling whose frequency divisors are the tensor `rope_freqs.weight` [head_dim / 2].

    GGUF stores the divisors and not the parameters they came from. The published parameters are tried first;
    otherwise they are fitted: between its two ends, 1/divisor is a straight line in the frequency. Only the
    ratios of original length, low and high show in the divisors, so a fit sets low to 1.

    Raises:
      InputError: no llama3 scaling gives these divisors.
    """
    tensor = gguf.tensors[ROPE_FACTORS]
    if tensor.shape != (head_dim // 2,):
        found, want = list(tensor.shape), [head_dim // 2]
        raise InputError(f"{gguf.path}: tensor {ROPE_FACTORS} has shape {found}, expected {want}")
    divisors = tensor.read(np.dtype(np.float32)).astype(np.float64)
    if not np.all(np.isfinite(divisors)) or divisors.min() < 1 - 1e-5:
        raise InputError(f"{gguf.path}: tensor {ROPE_FACTORS} holds values below 1, expected divisors of a llama3 rope")
    if divisors.max() < 1 + 1e-6:
        return RopeConfig(theta=theta)
    factor = float(f"{divisors.max():.6g}")
    plain, _ = rope_lib.inverse_frequencies(RopeConfig(theta=theta), head_dim, 1)

    def candidate(original: int, low: float, high: float) -> RopeConfig:
        return RopeConfig(
            kind="llama3", theta=theta, factor=factor, original_max_length=original,
            low_freq_factor=low, high_freq_factor=high,
        )  # fmt: skip

    def matches(rope: RopeConfig) -> bool:
        scaled, _ = rope_lib.inverse_frequencies(rope, head_dim, 1)
        return bool(np.allclose(plain / scaled.astype(np.float64), divisors, rtol=1e-4))

    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    for parameters in (_LLAMA3, *_fits(plain.astype(np.float64), smooth)):
        if matches(candidate(*parameters)):
            return candidate(*parameters)
    raise InputError(f"{gguf.path}: tensor {ROPE_FACTORS} is not the divisors of a llama3 rope")


def _fits(frequencies: np.ndarray, smooth: np.ndarray) -> Iterator[tuple[int, float, float]]:
    """Guesses at (original length, 1, high), from smooth = (original * frequency / 2 pi - 1) / (high - 1)."""
    inside = (smooth > 1e-3) & (smooth < 1 - 1e-3)
    if inside.sum() >= 2:
        slope, intercept = np.polyfit(frequencies[inside], smooth[inside], 1)
        if slope > 0 > intercept:
            high = 1 - 1 / intercept
            yield round(slope * 2 * np.pi * (high - 1)), 1.0, float(f"{high:.6g}")
    elif inside.sum() == 1:  # few dimensions; take the published ratio of high to low
        yield round(2 * np.pi * (3 * smooth[inside][0] + 1) / frequencies[inside][0]), 1.0, 4.0
    elif (smooth > 0.5).any() and (smooth < 0.5).any():  # any step between the two neighbours will do
        edge = frequencies[smooth > 0.5].min() * frequencies[smooth < 0.5].max()
        yield round(2 * np.pi * 2 / edge**0.5), 1.0, 4.0
