"""What a model is, before any weight is loaded: its sizes and its rotary embedding."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields that a kind does not use keep their defaults.

    Attributes:
      kind: the frequency scaling: "default", "linear", "llama3" or "yarn".
      theta: base of the inverse frequencies.
      factor: context extension, >= 1 (linear, llama3, yarn).
      original_max_length: positions the model was trained on before extension (llama3, yarn).
      low_freq_factor, high_freq_factor: band that llama3 interpolates over.
      beta_fast, beta_slow: rotations at which yarn starts and ends its ramp.
      attention_factor: yarn's scale of cos and sin; None derives it from `factor`
        (and from `mscale`, `mscale_all_dim` where both are given).
      truncate: whether yarn rounds the ends of its ramp to whole dimensions.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama, Qwen2, Qwen3 or Mistral family.

    Frozen and hashable, so it can be a static argument of `jax.jit`.

    Attributes:
      family: "llama", "qwen2", "qwen3" or "mistral"; names the foreign layout it came from.
      vocab_size, d_model, n_layers, n_heads, n_kv_heads, head_dim, d_ff: sizes;
        `head_dim` need not be `d_model / n_heads`.
      norm_eps: epsilon of every RMS norm.
      max_length: positions the model can attend over, prompt and completion together.
      tie_embeddings: the output projection is the embedding table.
      qk_norm: RMS norm over each query and key head before the rotary embedding (Qwen3).
      qkv_bias: biases on the query, key and value projections (Qwen2).
      o_bias: a bias on the attention output projection.
      rope: the rotary embedding.
      bos_id: token a prompt starts with, or None.
      eos_ids: tokens that end a completion unless the request says otherwise.
    """

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    norm_eps: float
    max_length: int
    tie_embeddings: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    rope: RopeConfig = RopeConfig()
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_length")
        for name in sizes:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {value!r}, expected a positive whole number")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads: {self.n_heads}, expected a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim}, expected an even number (rotary pairs)")

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.n_heads // self.n_kv_heads

    def to_json(self) -> str:
        """The config as JSON text; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: not JSON, a missing or unknown field, or a value out of range.
        """
        try:
            fields: Mapping[str, Any] = json.loads(text)
            return cls(**{**fields, "rope": RopeConfig(**fields["rope"]), "eos_ids": tuple(fields["eos_ids"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a config of this version: {error}") from error
