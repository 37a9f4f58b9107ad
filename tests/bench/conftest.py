"""A tiny model, and prompts for it."""

from __future__ import annotations

import json
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


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Texts, each of its own length; a byte is a token."""
    lengths = (10, 30, 50, 55, 60, 65, 70, 400)
    rows = [{"dataset": "lcc", "id": i, "prompt": chr(ord("a") + i) * n} for i, n in enumerate(lengths)]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(file)]
