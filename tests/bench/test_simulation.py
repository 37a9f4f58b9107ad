"""The simulator: acceptances, the paper's machine, the loop against arithmetic by hand, a machine that changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aspire_jax.costs import Fit
from aspire_jax.draft_length import AdaptiveDraftLength, AspireDraftLength, FixedDraftLength, NoDraft
from bench.simulation import hindsight, machine
from bench.simulation.acceptance import Acceptance, Generator, tokens_per_verification
from bench.simulation.drift import follow
from bench.simulation.replay import Scene, replay

STEP, TOKEN, READ, PAIR = COSTS = np.array([5e-3, 1e-5, 4e-8, 1e-9], np.float32)


def constant(accepted: int, length: int = 10_000, d_max: int = 16) -> Acceptance:
    """Every draft up to `accepted` is accepted, at every position."""
    run = np.full((4, 64), accepted, np.int32)
    return Acceptance(run, np.full((4, 64, d_max), 0.9, np.float32), np.full(4, length, np.int32))


def test_runs_end_at_the_next_rejection() -> None:
    made = Generator(3, 40, 5, of_request=0.5, of_span=1.0, seed=1)
    accepted, run = made._accepted(0.5), made.run(0.5)
    assert 0 < accepted.mean() < 1
    for r, p in np.ndindex(run.shape):
        row = accepted[r, p : p + 5]
        assert run[r, p] == (5 if row.all() else int(np.argmin(row)))


def test_tokens_per_verification_by_hand() -> None:
    """From 0: 2 of 3 accepted, to 3; from 3: none, to 4; from 4: all 3, to 8: 3 + 1 + 4 tokens in 3 verifications."""
    run = np.array([[2, 0, 0, 0, 9, 9, 9, 9]])
    assert tokens_per_verification(run, 3) == 8 / 3


def test_the_mean_is_fitted() -> None:
    made = Generator(32, 256, 8, of_request=0.5, of_span=1.0)
    assert tokens_per_verification(made.run(made.fitted(5, 4.2)), 5) == pytest.approx(4.2, abs=0.02)


@pytest.mark.parametrize("method", ["MagicDec", "Vegas", "ASPIRE-Fixed"])
def test_coefficients_give_the_papers_step_times(method: str) -> None:
    for model in machine.MODELS:
        for workload in machine.WORKLOADS:
            figures = machine.row(workload, model, method)
            b, length = (
                machine.coefficients(workload, model, method).astype(float),
                machine.context(workload, model, method),
            )
            chosen, rows = machine.selected(length), figures.batch
            draft = b @ [1, rows, rows * chosen, rows * chosen]
            verify = b @ [1, rows * 6, rows * length, rows * 6 * length]
            assert draft * 1e3 == pytest.approx(figures.draft, rel=1e-3)
            assert verify * 1e3 == pytest.approx(figures.verify, rel=1e-3)
            assert (b >= 0).all()


def test_mixed_coefficients_give_aspires_throughput() -> None:
    """Drafting as much as the paper's ASPIRE did, accepted as often, yields its tokens per second."""
    for model in machine.MODELS:
        for column, workload in enumerate(machine.WORKLOADS):
            figures = machine.row(workload, model, "ASPIRE")
            assert figures.acceptance is not None
            b, length = (
                machine.mixed_coefficients(workload, model).astype(float),
                machine.context(workload, model, "ASPIRE"),
            )
            chosen, rows = machine.selected(length), figures.batch
            drafts = (figures.per_verification - 1) / (figures.acceptance / 100)
            cycle = drafts * (b @ [1, rows, rows * chosen, rows * chosen])
            cycle += b @ [1, rows * (drafts + 1), rows * length, rows * (drafts + 1) * length]
            speed = rows * figures.per_verification / cycle
            paper = machine.tables()["throughput_tok_s"][model]["ASPIRE"][column]
            assert speed == pytest.approx(paper, rel=0.02)
            assert (b >= 0).all()


@pytest.mark.parametrize("accepted", [0, 2, 9])
def test_a_synchronised_run_by_hand(accepted: int) -> None:
    """Three drafts and a verification of four: min(accepted, 3) + 1 tokens a row."""
    scene = Scene(constant(accepted), 6, COSTS, COSTS, share=0.0, least=512.0)
    steps = 4 * 20
    found = replay(FixedDraftLength(gamma=3), [scene], mixed=False, shapes=machine.ExactShapes(), steps=steps)[0]
    got = min(accepted, 3)
    draft = STEP + 6 * (TOKEN + (READ + PAIR) * 512)
    length = 10_000 + 31  # the middle of a request's 64 positions
    verify = STEP + 6 * (4 * TOKEN + (READ + 4 * PAIR) * length)
    assert found.per_verification == got + 1
    assert found.drafts == 3
    assert found.acceptance == pytest.approx(got / 3)
    assert found.tokens_per_second == pytest.approx(6 * (got + 1) / (3 * draft + verify), rel=2e-3)


def test_padding_rows_take_no_part() -> None:
    small = Scene(constant(2), 2, COSTS, COSTS)
    large = Scene(constant(2), 7, COSTS, COSTS)
    policy, shapes = AspireDraftLength(in_step=False), machine.ExactShapes()
    alone = replay(policy, [small], mixed=True, shapes=shapes, steps=60)[0]
    padded = replay(policy, [small, large], mixed=True, shapes=shapes, steps=60)[0]
    assert padded == pytest.approx(alone, rel=1e-5)


def test_hindsight_by_hand_and_above_all_others() -> None:
    scene = Scene(constant(2), 4, COSTS, COSTS, share=0.0, least=512.0)
    draft = STEP / 4 + TOKEN + (READ + PAIR) * 512
    verify = STEP / 4 + 3 * TOKEN + (READ + 3 * PAIR) * (10_000 + 31.5)
    assert hindsight.tokens_per_second(scene) == pytest.approx(3 / (2 * draft + verify), rel=1e-3)
    made = Generator(16, 128, 16, of_request=0.5, of_span=1.0)
    scene = Scene(made.acceptance(2.0, np.full(16, 30_000)), 8, COSTS, COSTS)
    best = hindsight.tokens_per_second(scene)
    for policy in (FixedDraftLength(gamma=4), AdaptiveDraftLength()):
        found = replay(policy, [scene], mixed=True, shapes=machine.ExactShapes(), steps=400)[0]
        assert found.tokens_per_second < best


def test_a_policy_must_draft() -> None:
    with pytest.raises(ValueError, match="d_max"):
        replay(NoDraft(), [Scene(constant(1), 2, COSTS, COSTS)], mixed=True, shapes=machine.ExactShapes(), steps=4)


def test_a_change_of_machine_is_followed() -> None:
    """Attention becomes eight times dearer than the rest: with the old coefficients verifications come too often.

    A fit told of every run has, eighty runs later, at least 95 % of the speed that knowing the machine gives.
    """
    made = Generator(16, 128, 16, of_request=0.5, of_span=0.5)
    old = np.array([2e-2, 1e-5, 1e-9, 0], np.float32)
    new = np.array([2e-3, 1e-5, 6e-8, 0], np.float32)
    scene = Scene(made.acceptance(3.0, np.full(16, 16_000)), 8, old, old)
    policy = dataclasses.replace(AdaptiveDraftLength(), confidence=False)

    def late(fit: Fit | None, scene: Scene) -> float:
        runs = [old] * 10 + [new] * 120
        speeds = follow(policy, scene, runs, mixed=True, shapes=machine.ExactShapes(), fit=fit)
        return float(np.mean(speeds[-40:]))

    known, stale, fitted = late(None, scene._replace(believed=new)), late(None, scene), late(Fit(old), scene)
    assert stale < 0.9 * known
    assert fitted > 0.95 * known
