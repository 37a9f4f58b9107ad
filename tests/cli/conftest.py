"""A tiny model on disk and in memory, and `aspire` called in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

import aspire_jax
from aspire_jax.cli import main, setup
from tests.api import models


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model(folder: Path) -> aspire_jax.Model:
    return aspire_jax.load(folder)


@pytest.fixture
def aspire(capsys: pytest.CaptureFixture) -> Callable[..., Outcome]:
    def call(*argv: object) -> Outcome:
        capsys.readouterr()
        code = main([str(a) for a in argv])
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def loaded(model: aspire_jax.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares tests that call the command often the reading of the checkpoint."""
    monkeypatch.setattr(setup, "load_model", lambda *_args, **_more: model)
