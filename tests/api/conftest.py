"""The tiny model, and what plain decoding makes of the prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

import aspire_jax
from tests.api import models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model(folder: Path) -> aspire_jax.Model:
    return aspire_jax.load(folder)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return models.token_prompts(1, 2, 17, 60, 87, 33, 5)


@pytest.fixture(scope="session")
def plain(model: aspire_jax.Model, prompts: list[list[int]]) -> list[aspire_jax.Completion]:
    """Forty tokens for each prompt, whatever they are."""
    requests = [aspire_jax.Request(token_ids=p, ignore_eos=True) for p in prompts]
    return aspire_jax.generate(model, requests, method="autoregressive", max_tokens=40, slots=3)
