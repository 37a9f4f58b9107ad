"""The sizes `bench.gpu` runs at: those of the paper, and tiny ones that show on any machine that it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from aspire_jax.config import ModelConfig
from bench.gpu_models import MODELS

METHODS = ("autoregressive", "aspire", "aspire-fixed", "aspire-fsm", "adaptive", "vegas", "magicdec-streaming")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What to measure.

    Attributes:
      models: by name, in order of worth.
      batch: rows of each model's runs; context: committed tokens of a row there; new: room for completions.
      methods: whole runs.
      attention: (rows, context) of the kernels' bandwidth.
      heads, group, dim, page_size: of the kernels' own measurements.
      dtype: of weights and cache.
      copy: bytes that the copy moves one way.
      repeats: of every timing; steps: of a whole run.
      d_max: most drafts a row may hold, where the method has a choice.
      interpret: kernels run in Pallas's interpreter.
    """

    models: Mapping[str, ModelConfig]
    batch: Mapping[str, int]
    context: int
    new: int
    methods: tuple[str, ...]
    attention: tuple[tuple[int, int], ...]
    heads: int
    group: int
    dim: int
    page_size: int
    dtype: str
    copy: int
    repeats: int
    steps: int
    d_max: int
    interpret: bool


FULL = Sizes(
    models={name: MODELS[name] for name in ("Qwen3-8B", "Qwen3-1.7B", "DeepSeek-R1-Distill-Llama-8B")},
    batch={"Qwen3-8B": 12, "Qwen3-1.7B": 18, "DeepSeek-R1-Distill-Llama-8B": 14},  # the paper's for LB-v2[30k-40k]
    context=32_768,
    new=512,
    methods=METHODS,
    attention=((24, 16_384), (12, 32_768), (5, 90_112)),
    heads=8,
    group=4,
    dim=128,
    page_size=16,
    dtype="bfloat16",
    copy=4 << 30,
    repeats=8,
    steps=192,
    d_max=16,
    interpret=False,
)
TINY = Sizes(
    models={
        "Qwen3-8B": ModelConfig(
            family="qwen3", vocab_size=61, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=32,
            norm_eps=1e-6, max_length=512, tie_embeddings=True, qk_norm=True,
        )
    },
    batch={"Qwen3-8B": 2},
    context=32,
    new=64,
    methods=("aspire",),
    attention=((2, 32),),
    heads=2,
    group=2,
    dim=16,
    page_size=16,
    dtype="float32",
    copy=1 << 16,
    repeats=1,
    steps=6,
    d_max=2,
    interpret=True,
)  # fmt: skip
