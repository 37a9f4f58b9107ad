"""Step times on other cards, batches and contexts, from data sheets: what would change, not what was measured.

A step reads the weights, and each row its keys and values, at 80 % of the card's bandwidth; products run at half its
dense bfloat16 rate; the rest of a step, launches and small kernels, takes what the paper's own fitted constant leaves
over its weights. Tensor parallelism divides reads and products and adds two all-reduces a layer.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import numpy as np

from aspire_jax import params
from aspire_jax.config import ModelConfig
from bench.gpu_models import MODELS
from bench.simulation import machine


class Card(NamedTuple):
    """A data sheet: bandwidth in bytes a second, dense bfloat16 operations a second, memory in bytes."""

    bandwidth: float
    products: float
    memory: float


# Sources: NVIDIA's data sheets of each card.
CARDS = {
    "A100 80GB": Card(2.04e12, 312e12, 80e9),
    "H100 NVL": Card(3.9e12, 835e12, 94e9),
    "H100 SXM": Card(3.35e12, 989e12, 80e9),
    "H200": Card(4.8e12, 989e12, 141e9),
    "B200": Card(8.0e12, 2250e12, 180e9),
}
# The paper's card, by which its constant is split.
PAPERS = "H100 NVL"
READS, PRODUCTS = 0.8, 0.5
# Seconds of one all-reduce of a step's few hundred kilobytes between the cards of one machine: latency, an assumption.
ALL_REDUCE = 1.2e-5
BYTES = 2


def overhead() -> float:
    """Seconds of a step beyond reading weights: the median over the paper's models and workloads."""
    card = CARDS[PAPERS]
    rest = []
    for model in machine.MODELS:
        weights = params.count(MODELS[model]) * BYTES / (READS * card.bandwidth)
        rest += [machine.mixed_coefficients(workload, model)[0] - weights for workload in machine.WORKLOADS]
    return max(float(statistics.median(rest)), 0.0)


def coefficients(config: ModelConfig, card: Card, parallel: int = 1) -> np.ndarray:
    """The cost model's coefficients [4] on `parallel` of these cards."""
    reads, products = READS * card.bandwidth * parallel, PRODUCTS * card.products * parallel
    count = params.count(config)
    cached = 2 * config.n_layers * config.n_kv_heads * config.head_dim * BYTES
    pair = 4 * config.n_layers * config.n_heads * config.head_dim / products
    step = count * BYTES / reads + overhead()
    if parallel > 1:
        step += 2 * config.n_layers * ALL_REDUCE
    return np.array([step, 2 * count / products, cached / reads, pair], np.float32)


def fits(config: ModelConfig, card: Card, batch: int, context: int, parallel: int = 1) -> bool:
    """Whether weights and caches fit into nine tenths of the cards' memory."""
    cached = 2 * config.n_layers * config.n_kv_heads * config.head_dim * BYTES
    return params.count(config) * BYTES + batch * context * cached < 0.9 * parallel * card.memory
