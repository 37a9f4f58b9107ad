"""The cost model and its online fit."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import costs, params

from . import tiny

TRUTH = np.array([0.02, 3e-4, 2e-6, 4e-8])


def runs(n: int, seed: int = 0) -> np.ndarray:
    """Work of `n` runs of differing steps, widths, reads and pairs [n, 4]."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, 40, n).astype(np.float64)
    width = steps * rng.choice([8, 16, 32, 72], n)
    read = steps * rng.uniform(1e3, 8e4, n)
    return np.stack([steps, width, read, read * rng.uniform(1, 9, n)], axis=1)


def fitted(truth: np.ndarray, prior: np.ndarray, n: int = 200, noise: float = 0.0) -> costs.Fit:
    fit, rng = costs.Fit(prior), np.random.default_rng(7)
    for work in runs(n):
        fit.update(work, float(work @ truth) * (1 + noise * rng.standard_normal()))
    return fit


def error(fit: costs.Fit, truth: np.ndarray) -> np.ndarray:
    """Relative error of predicted times of runs not seen."""
    work = runs(200, seed=1)
    return np.abs(work @ fit.coefficients / (work @ truth) - 1)


def test_seconds_by_hand() -> None:
    model = tiny.cost(1.0, 0.1, 0.01, 0.001)
    assert float(model.seconds(costs.work(jnp.float32(8), jnp.float32(100), jnp.float32(300)))) == pytest.approx(3.1)
    many = model.seconds(costs.work(jnp.array([8, 16]), jnp.array([100.0, 0.0]), jnp.float32(0)))
    np.testing.assert_allclose(many, [2.8, 2.6], rtol=1e-6)


def test_the_papers_three_terms() -> None:
    """tau = b_model + b_mlp * n_t + b_attn * (drafting contexts + verifying contexts)."""
    drafting, verifying, drafts = [112.0, 80.0], [1000.0, 500.0], [3, 1]
    b_model, b_mlp, b_attn = 2.0, 0.5, 0.001
    n_t = len(drafting) + sum(d + 1 for d in drafts)
    tau = b_model + b_mlp * n_t + b_attn * (sum(drafting) + sum(verifying))
    work = costs.work(jnp.float32(n_t), jnp.float32(sum(drafting) + sum(verifying)), jnp.float32(12345))
    assert float(tiny.cost(b_model, b_mlp, b_attn, 0.0).seconds(work)) == pytest.approx(tau)


@pytest.mark.parametrize("start", [1.0, 1e-3, 1e4])
def test_fit_recovers_planted_coefficients_whatever_the_priors_speed(start: float) -> None:
    prior = start * TRUTH * np.array([0.5, 2.0, 1.5, 0.7])
    far, fit = costs.Fit(prior.astype(np.float32)), fitted(TRUTH, prior.astype(np.float32))
    assert np.median(error(fit, TRUTH)) < 0.02
    assert error(fit, TRUTH).max() < 0.1
    # What the runs tell apart badly keeps something of the prior.
    assert np.all(np.abs(fit.coefficients / TRUTH - 1) < 0.4)
    assert np.median(error(far, TRUTH)) > 0.3


def test_fit_with_noise() -> None:
    fit = fitted(TRUTH, (TRUTH * np.array([0.5, 2.0, 1.5, 0.7])).astype(np.float32), noise=0.1)
    assert np.median(error(fit, TRUTH)) < 0.03
    assert error(fit, TRUTH).max() < 0.15


def test_one_run_sets_the_speed_and_keeps_the_proportions() -> None:
    fit = costs.Fit(TRUTH.astype(np.float32))
    work = runs(1)[0]
    fit.update(work, 10 * float(work @ TRUTH))
    np.testing.assert_allclose(fit.coefficients / TRUTH, 10, rtol=1e-4)


def test_fit_follows_a_machine_that_changes() -> None:
    fit, slow = fitted(TRUTH, TRUTH.astype(np.float32)), TRUTH * np.array([3.0, 3.0, 1.0, 1.0])
    assert np.median(error(fit, slow)) > 0.1
    for work in runs(150, seed=2):
        fit.update(work, float(work @ slow))
    assert error(fit, slow).max() < 0.05


def test_coefficients_stay_positive_and_finite_whatever_is_measured() -> None:
    rng, fit = np.random.default_rng(3), costs.Fit(TRUTH.astype(np.float32))
    for work in runs(300, seed=3):
        fit.update(work, float(np.exp(rng.uniform(-12, 6))))
        assert np.all(fit.coefficients > 0)
        assert np.isfinite(fit.coefficients).all()
    assert fit.coefficients.dtype == np.float32


def test_runs_all_alike_leave_no_direction_undetermined() -> None:
    fit, work = costs.Fit(TRUTH.astype(np.float32)), runs(1)[0]
    for _ in range(2000):
        fit.update(work, 2 * float(work @ TRUTH))
    assert float(work @ fit.coefficients) == pytest.approx(2 * float(work @ TRUTH), rel=0.02)
    np.testing.assert_allclose(fit.coefficients / TRUTH, 2, rtol=0.1)


@pytest.mark.parametrize("noise", [0.03, 0.1, 0.2])
@pytest.mark.parametrize("first", [1.0, 3.0, 8.0])
def test_runs_of_one_kind_keep_the_proportions(first: float, noise: float) -> None:
    """Whatever a shared machine does to their times, and however slow the first one is."""
    prior = np.array([0.027, 1.8e-3, 2.3e-6, 4.6e-7])
    verify, draft, plain = np.array([[1, 32, 56320, 4 * 56320], [1, 8, 4096, 4096], [1, 8, 56320, 56320]], float)
    for seed in range(5):
        fit, rng = costs.Fit(prior), np.random.default_rng(seed)
        for i in range(30):
            steps = 16 if i % 6 else 4
            fit.update(steps * plain, steps * 0.2 * np.exp(noise * rng.standard_normal()) * (1 if i else first))
        for work in (verify, draft):
            kept = (work @ fit.coefficients) / (plain @ fit.coefficients) / ((work @ prior) / (plain @ prior))
            assert kept == pytest.approx(1, abs=0.05 + noise)


def test_one_run_far_off_is_not_believed_and_two_are() -> None:
    fit, work = fitted(TRUTH, TRUTH.astype(np.float32)), runs(1)[0]
    before = fit.coefficients
    fit.update(work, 3 * float(work @ TRUTH))
    assert np.array_equal(fit.coefficients, before)
    fit.update(work, float(work @ TRUTH))
    assert float(work @ fit.coefficients) == pytest.approx(float(work @ TRUTH), rel=0.02)
    for _ in range(6):
        fit.update(work, 3 * float(work @ TRUTH))
    assert float(work @ fit.coefficients) == pytest.approx(3 * float(work @ TRUTH), rel=0.1)


def test_empty_runs_change_nothing() -> None:
    fit = costs.Fit(TRUTH.astype(np.float32))
    before = fit.coefficients
    fit.update(np.zeros(4), 1.0)
    fit.update(runs(1)[0], 0.0)
    assert np.array_equal(fit.coefficients, before)


def test_roofline_by_hand() -> None:
    c = dataclasses.replace(tiny.config(layers=3, heads=4, kv=2))
    n = params.count(c)
    got = costs.roofline(c, itemsize=2, bandwidth=1e9, flops=1e12)
    # 2 (k, v) x 3 layers x 2 heads x 16 x 2 bytes; 2 products x 2 operations x 3 layers x 4 heads x 16
    np.testing.assert_allclose(got, [2 * n / 1e9, 2 * n / 1e12, 384 / 1e9, 768 / 1e12], rtol=1e-6)
