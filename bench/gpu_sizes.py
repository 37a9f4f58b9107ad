"""The sizes `bench.gpu` runs at: those of the paper, and tiny ones that show on any machine that it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from aspire_jax.config import ModelConfig
from aspire_jax.methods import METHODS
from bench.gpu_models import MODELS
from bench.simulation import machine

# The workload that every model is measured on first; the others in order of how much attention there is to spare.
HEADLINE = "LB-v2[30k-40k]"
WORKLOADS = (HEADLINE, "LB-v2[80k-100k]", "LB[16k-18k]", "AIME25", "CodeElo")
# What tells most about a workload; the other methods come later.
LEADING = ("autoregressive", "aspire", "adaptive")


class Load(NamedTuple):
    """One workload of one model: rows, and committed tokens of a row."""

    batch: int
    context: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What to measure.

    Attributes:
      models: by name, in order of worth.
      loads: by model and workload, in order of worth.
      leading: methods that every workload is measured with first; methods: all of them.
      batch: rows of each model's single steps; context: committed tokens of a row there.
      new: room for completions.
      attention: (rows, context) of the kernels' bandwidth.
      heads, group, dim, page_size: of the kernels' own measurements.
      dtype: of weights and cache.
      copy: bytes that the copy moves one way.
      repeats: of every timing; steps: of a whole run.
      d_max: most drafts a row may hold, where the method has a choice.
      implementation: of whole models; interpret: kernels run in Pallas's interpreter.
    """

    models: Mapping[str, ModelConfig]
    loads: Mapping[str, Mapping[str, Load]]
    leading: tuple[str, ...]
    methods: tuple[str, ...]
    batch: Mapping[str, int]
    context: int
    new: int
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
    implementation: Literal["xla", "pallas"] = "pallas"
    interpret: bool = False

    def load(self, model: str, workload: str) -> Load:
        """The load of a workload."""
        return self.loads[model][workload]


def _loads(model: str) -> dict[str, Load]:
    """The paper's rows; its contexts in the middle of a generation."""
    return {
        workload: Load(machine.row(workload, model, "AutoRegressive").batch, round(machine.context(workload, model)))
        for workload in WORKLOADS
    }


_ORDER = ("Qwen3-8B", "Qwen3-1.7B", "DeepSeek-R1-Distill-Llama-8B")
FULL = Sizes(
    models={name: MODELS[name] for name in _ORDER},
    loads={name: _loads(name) for name in _ORDER},
    leading=LEADING,
    methods=(*LEADING, *(name for name in METHODS if name not in LEADING)),
    batch={name: machine.row(HEADLINE, name, "AutoRegressive").batch for name in _ORDER},
    context=32_768,
    new=512,
    attention=((24, 16_384), (12, 32_768), (5, 90_112)),
    heads=8,
    group=4,
    dim=128,
    page_size=16,
    dtype="bfloat16",
    copy=4 << 30,
    repeats=8,
    steps=160,
    d_max=16,
)
TINY = Sizes(
    models={
        "Qwen3-8B": ModelConfig(
            family="qwen3", vocab_size=61, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=32,
            norm_eps=1e-6, max_length=512, tie_embeddings=True, qk_norm=True,
        )
    },
    loads={"Qwen3-8B": {HEADLINE: Load(2, 32)}},
    leading=("autoregressive",),
    methods=("autoregressive", "oracle"),
    batch={"Qwen3-8B": 2},
    context=32,
    new=64,
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
    implementation="xla",  # whole models compile slowly in the interpreter; the kernels' own measurements run in it
    interpret=True,
)  # fmt: skip
