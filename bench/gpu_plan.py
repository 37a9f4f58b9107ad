"""What `bench.gpu` does in which order, what must be read for it, and how long that takes a card at the least."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from aspire_jax import params
from aspire_jax.config import ModelConfig
from bench.gpu_sizes import HEADLINE, Load, Sizes

# Share of a card's memory that weights and cache may take; the rest is for temporaries and what XLA tunes with.
_FILLED = 0.95
# A draft reads this share of its context, and so many pages at least (`RefreshContext`'s own).
_RHO, _LEAST_PAGES = 0.07, 32
_COLUMNS = ("rows", "context", "held GB", "plain ms", "draft ms", "runs s")


class Stage(NamedTuple):
    """Whole runs of one workload of one model, whose weights are at hand meanwhile.

    Attributes:
      steps: whether the model's single steps are measured first.
      methods: in order of worth.
    """

    model: str
    workload: str
    steps: bool
    methods: tuple[str, ...]


def stages(sizes: Sizes) -> Iterator[Stage]:
    """All there is to measure, the most telling first: where the time ends, what is lost is worth least."""
    rest = tuple(m for m in sizes.methods if m not in sizes.leading)
    for model in sizes.models:
        yield Stage(model, HEADLINE, True, sizes.leading)
    for model in sizes.models:
        yield Stage(model, HEADLINE, False, rest)
    for methods in (sizes.leading, rest):
        for model in sizes.models:
            yield from (Stage(model, w, False, methods) for w in sizes.loads[model] if w != HEADLINE)


def itemsize(sizes: Sizes) -> int:
    """Bytes of a weight, and of a key's element."""
    return np.dtype(jnp.dtype(sizes.dtype)).itemsize


def weight_bytes(config: ModelConfig, size: int) -> int:
    """What a step reads of the weights: all but an embedding that is only looked up in."""
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    return (params.count(config) - looked_up) * size


def token_bytes(config: ModelConfig, size: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * size


def selected(context: int, page_size: int) -> int:
    """Tokens that a draft reads of its context."""
    pages = -(-context // page_size)
    return min(pages, max(_LEAST_PAGES, math.ceil(_RHO * pages))) * page_size


def step_bytes(sizes: Sizes, model: str, load: Load, drafting: float) -> float:
    """What a step reads at the least, where a share `drafting` of its rows drafts and the others verify.

    Weights and the pages that rows read in every layer; the refresh layer's full read while drafting is not in it.
    """
    config, size = sizes.models[model], itemsize(sizes)
    read = drafting * selected(load.context, sizes.page_size) + (1 - drafting) * load.context
    return weight_bytes(config, size) + load.batch * read * token_bytes(config, size)


def held_bytes(sizes: Sizes, model: str, load: Load) -> int:
    """Weights and cache."""
    config, size = sizes.models[model], itemsize(sizes)
    room = -(-(load.context + sizes.new) // sizes.page_size) * sizes.page_size
    return params.count(config) * size + load.batch * room * token_bytes(config, size)


def fitting(sizes: Sizes, model: str, load: Load, memory: int | None) -> Load:
    """The load with as many rows as fit into `memory` bytes, at least one; the paper's card had 96 GB."""
    batch = load.batch
    while memory is not None and batch > 1 and held_bytes(sizes, model, load._replace(batch=batch)) > _FILLED * memory:
        batch -= 1
    return load._replace(batch=batch)


def describe(sizes: Sizes, rate: float) -> str:
    """The stages, what is held and read in them, and the least seconds of their runs on a card of `rate` GB/s."""
    lines = [
        f"at {rate:.0f} GB/s: what a plain and a draft step take at the least, and the runs of all methods of a stage",
        f"{'model':<30}{'workload':<17}" + "".join(f"{what:>10}" for what in _COLUMNS),
    ]
    total = 0.0
    for stage in stages(sizes):
        load = sizes.load(stage.model, stage.workload)
        plain, draft = (step_bytes(sizes, stage.model, load, share) / rate / 1e9 for share in (0.0, 1.0))
        # A plain step each; or five drafts for each verification, which reads as a plain step does.
        seconds = sum(
            sizes.steps * (plain if m == "autoregressive" else (plain + 5 * draft) / 6) for m in stage.methods
        )
        total += seconds
        held = held_bytes(sizes, stage.model, load) / 1e9
        lines.append(
            f"{stage.model:<30}{stage.workload:<17}{load.batch:>10}{load.context:>10}"
            f"{held:>10.1f}{1e3 * plain:>10.2f}{1e3 * draft:>10.2f}{seconds:>10.1f}"
            f"  {' '.join(stage.methods)}{' (and single steps)' if stage.steps else ''}"
        )
    lines.append(f"all runs {total:.0f} s; compiling comes on top and is most of a first run's time")
    return "\n".join(lines)
