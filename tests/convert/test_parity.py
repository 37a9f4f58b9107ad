"""Logits of converted models against transformers': committed references everywhere, live where torch is installed."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import checkpoint, model
from aspire_jax.config import RopeConfig
from convert import convert
from tests.fixtures import cases, make_parity

TOLERANCE = 1e-4

_logits = partial(jax.jit, static_argnums=0)(model.dense_logits)


@pytest.fixture(scope="module", params=list(cases.CASES))
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def logits(case: str, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The case through the whole converter, a restore and the model: [LENGTH, VOCAB]."""
    folder = tmp_path_factory.mktemp("parity")
    convert(cases.write_folder(folder / "hf", case), folder / "out")
    config = checkpoint.load_config(folder / "out")
    params = checkpoint.load_params(folder / "out", config)
    return np.asarray(_logits(config, params, jnp.asarray(cases.tokens(case))))


def test_logits_equal_the_committed_references(case: str, logits: np.ndarray) -> None:
    with np.load(make_parity.FILE) as references:
        reference = references[case]
    assert np.abs(reference).max() > 1.0  # a model of zeros would agree with anything
    np.testing.assert_allclose(logits[make_parity.EVERY - 1 :: make_parity.EVERY], reference, rtol=0, atol=TOLERANCE)


def test_logits_equal_transformers(case: str, logits: np.ndarray) -> None:
    pytest.importorskip("torch")
    np.testing.assert_allclose(logits, make_parity.reference_logits(case), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", [name for name in cases.CASES if "default" not in name and "bias" not in name])
def test_the_references_notice_the_rope(case: str, tmp_path: Path) -> None:
    """Without its scaling, every scaled case would miss its reference by far."""
    convert(cases.write_folder(tmp_path / "hf", case), tmp_path / "out")
    config = checkpoint.load_config(tmp_path / "out")
    plain = dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))
    params = checkpoint.load_params(tmp_path / "out", config)
    logits = np.asarray(_logits(plain, params, jnp.asarray(cases.tokens(case))))
    with np.load(make_parity.FILE) as references:
        worst = np.abs(logits[make_parity.EVERY - 1 :: make_parity.EVERY] - references[case]).max()
    assert worst > 100 * TOLERANCE


def test_every_case_has_a_reference_and_no_other() -> None:
    with np.load(make_parity.FILE) as references:
        assert set(references) == set(cases.CASES)
    assert Path(make_parity.FILE).stat().st_size < 100_000
