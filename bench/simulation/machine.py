"""Step times: coefficients of the cost model for the paper's machine, and step shapes without stairs.

The paper fits one linear model per GPU: constant, packed tokens, context tokens (arXiv 2609.17943, section 4.3). Here
its three coefficients are solved from the draft, verify and AutoRegressive times that its appendix tabulates for every
model, workload and method.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import costs

TABLES = Path(__file__).parent.parent / "data" / "paper_tables.json"
MODELS = ("Qwen3-1.7B", "Qwen3-8B", "DeepSeek-R1-Distill-Llama-8B")
WORKLOADS = ("AIME25", "CodeElo", "LB[16k-18k]", "LB-v2[30k-40k]", "LB-v2[80k-100k]")
# Drafts of the paper's synchronised methods.
GAMMA = 5
# Prompt tokens of the workloads: the middle of the bucket; of AIME25 and CodeElo about what their problems have.
PROMPT = {"AIME25": 150, "CodeElo": 600, "LB[16k-18k]": 17_000, "LB-v2[30k-40k]": 35_000, "LB-v2[80k-100k]": 90_000}
LAYERS = {"Qwen3-1.7B": 28, "Qwen3-8B": 36, "DeepSeek-R1-Distill-Llama-8B": 32}


@cache
def tables() -> dict[str, Any]:
    """The paper's figures."""
    return json.loads(TABLES.read_text())


class Row(NamedTuple):
    """A line of the paper's per-method table; times in milliseconds."""

    batch: int
    per_verification: float
    acceptance: float | None
    generated: float
    draft: float | None
    verify: float | None


def row(workload: str, model: str, method: str) -> Row:
    """The paper's figures of one run."""
    return Row(*tables()["detail"][workload][model][method])


def context(workload: str, model: str, method: str = "AutoRegressive") -> float:
    """Mean committed tokens of a request, over its generation."""
    return PROMPT[workload] + row(workload, model, method).generated / 2


def selected(tokens: float) -> float:
    """Tokens that a draft reads: a share of 0.07 of the context and at least 32 pages of 16."""
    return max(512.0, 0.07 * tokens)


PARAMETERS = {"Qwen3-1.7B": 1.72e9, "Qwen3-8B": 8.19e9, "DeepSeek-R1-Distill-Llama-8B": 8.03e9}
# Half of the card's 989 TFLOP/s in bfloat16: what large matrix products reach.
PRODUCTS = 0.5 * 989e12


def coefficients(workload: str, model: str, method: str = "ASPIRE-Fixed") -> np.ndarray:
    """Coefficients [4] that reproduce the method's draft and verify times, and where they allow it the plain step's.

    A packed token costs its products. What six queries take longer than one beyond that is their attention's, so it
    goes into the query-context pairs; nothing where the paper's verification is faster than its plain step.
    """
    figures, plain = row(workload, model, method), row(workload, model, "AutoRegressive")
    assert figures.draft is not None and figures.verify is not None and plain.verify is not None
    length = context(workload, model, method)
    chosen = min(selected(length), length)
    token = 2 * PARAMETERS[model] / PRODUCTS
    batch, queries = figures.batch, GAMMA + 1
    # Plain steps of as many rows as the method had.
    plain_seconds = plain.verify / 1e3 * batch / plain.batch
    beyond = max((figures.verify / 1e3 - plain_seconds) / (GAMMA * batch) - token, 0.0)
    pair = beyond / length
    # verify - draft = B (5 token + read (l - s) + pair (6 l - s))
    rest = (figures.verify - figures.draft) / 1e3 / batch - GAMMA * token - pair * (queries * length - chosen)
    read = max(rest, 0.0) / (length - chosen)
    step = figures.draft / 1e3 - batch * (token + (read + pair) * chosen)
    return np.array([step, token, read, pair], np.float32)


def mixed_coefficients(workload: str, model: str) -> np.ndarray:
    """Coefficients [4] of the methods that mix drafting and verifying rows.

    Their verify time is not tabulated, but throughput, acceptance and tokens per verification of ASPIRE imply what a
    cycle takes, and its draft time what is left for the verification. That comes to 0.9 to 1.3 plain steps: in a mixed
    step the products of a few verifying rows hide behind the weights that are read anyway.
    """
    figures, plain = row(workload, model, "ASPIRE"), row(workload, model, "AutoRegressive")
    assert figures.draft is not None and figures.acceptance is not None and plain.verify is not None
    speed = tables()["throughput_tok_s"][model]["ASPIRE"][WORKLOADS.index(workload)]
    batch, length = figures.batch, context(workload, model, "ASPIRE")
    chosen = min(selected(length), length)
    drafts = (figures.per_verification - 1) / (figures.acceptance / 100)
    draft = figures.draft / 1e3
    verify = batch * figures.per_verification / speed - drafts * draft
    beyond = max(verify - plain.verify / 1e3, 0.0) / (drafts * batch)
    token = min(beyond, 2 * PARAMETERS[model] / PRODUCTS)
    pair = (beyond - token) / length
    read = (verify - draft - drafts * batch * beyond) / (batch * (length - chosen)) - pair
    step = draft - batch * (token + (read + pair) * chosen)
    return np.array([step, token, read, pair], np.float32)


class ExactShapes(NamedTuple):
    """Step shapes of a machine without stairs: a step computes its tokens and reads its context, nothing more.

    Attributes:
      refreshes: share of the layers that read the full context while drafting.
      mixed: whether rows may draft and verify in one step.
    """

    refreshes: float = 0.0
    mixed: bool = True

    def forecast(self, drafting: jax.Array, queries: jax.Array, lengths: jax.Array, selected: jax.Array) -> jax.Array:
        """Work [4] of a step; arguments as `shapes.Shapes.forecast`."""
        full = lengths.astype(jnp.float32)
        read = jnp.where(drafting, selected + np.float32(self.refreshes) * full, jnp.where(queries > 0, full, 0.0))
        read = jnp.where(queries > 0, read, 0.0)
        return costs.work(jnp.sum(queries), jnp.sum(read), jnp.sum(read * queries.astype(jnp.float32)))

    def copy(self, selected: jax.Array) -> jax.Array:
        """Nothing is copied: kernels read the pages where they are."""
        return jnp.zeros((costs.TERMS,), jnp.float32) * jnp.sum(selected)
