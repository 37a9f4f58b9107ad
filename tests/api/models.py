"""A converted model of two random layers with a byte-level tokenizer, and prompts for it."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from aspire_jax import Method, ModelConfig, checkpoint, params
from aspire_jax.context import RefreshContext
from aspire_jax.draft_length import FixedDraftLength
from tests.fixtures import cases

CONFIG = ModelConfig(
    family="llama",
    vocab_size=260,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    norm_eps=1e-5,
    max_length=128,
    tie_embeddings=True,
    bos_id=1,
    eos_ids=(2,),
)

# Always drafts, so that what a test sees does not depend on the machine's speed.
DRAFTS = Method(RefreshContext(k_min=2, recent=1), FixedDraftLength(gamma=3))
# The method of the paper with few step shapes, for its scheduler's sake.
ASPIRE = {"d_max": 3, "gamma_init": 2, "k_min": 2, "recent": 1}


def build(folder: Path, *, seed: int = 0) -> Path:
    """Writes the converted model."""
    folder.mkdir(parents=True)
    checkpoint.save_config(folder, CONFIG)
    checkpoint.save_params(folder, params.random(CONFIG, jax.random.key(seed)))
    cases.write_tokenizer(folder)
    return folder


def token_prompts(*lengths: int) -> list[list[int]]:
    """Random prompts of ordinary tokens."""
    rng = np.random.default_rng(3)
    return [rng.integers(3, CONFIG.vocab_size, n).tolist() for n in lengths]
