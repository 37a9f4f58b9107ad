"""Sizes of the models that are compiled for, and measured on, a GPU; and the paper's batch for each workload."""

from __future__ import annotations

from aspire_jax.config import ModelConfig, RopeConfig

# Sources: the models' published config.json. `max_length` is the longest context measured; the weights are random, so
# how a rotary embedding is stretched to it does not matter here.
_LENGTH = 131_072
MODELS: dict[str, ModelConfig] = {
    "Qwen3-1.7B": ModelConfig(
        family="qwen3", vocab_size=151_936, d_model=2048, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128,
        d_ff=6144, norm_eps=1e-6, max_length=_LENGTH, tie_embeddings=True, qk_norm=True, rope=RopeConfig(theta=1e6),
    ),
    "Qwen3-8B": ModelConfig(
        family="qwen3", vocab_size=151_936, d_model=4096, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128,
        d_ff=12_288, norm_eps=1e-6, max_length=_LENGTH, tie_embeddings=False, qk_norm=True, rope=RopeConfig(theta=1e6),
    ),
    "DeepSeek-R1-Distill-Llama-8B": ModelConfig(
        family="llama", vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
        d_ff=14_336, norm_eps=1e-5, max_length=_LENGTH, tie_embeddings=False,
        rope=RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_length=8192),
    ),
}  # fmt: skip
