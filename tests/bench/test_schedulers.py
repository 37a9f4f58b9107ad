"""Recorded traces in the simulator, and what the signals say, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from aspire_jax.errors import InputError
from bench import schedulers
from bench.simulation import recorded
from tests.bench.made import trace

D_MAX, LONG = 4, 12


def test_recorded_acceptances_by_position() -> None:
    accepted = np.random.default_rng(0).integers(0, D_MAX + 1, (2, LONG))
    found = recorded.acceptance([trace(accepted), trace(accepted[:, : LONG - 2])])
    assert found.run.shape == (4, LONG - 2)
    np.testing.assert_array_equal(found.run[:2], accepted[:, : LONG - 2])
    np.testing.assert_array_equal(found.run[2:], accepted[:, : LONG - 2])
    assert found.start.tolist() == [100] * 4
    np.testing.assert_array_equal(found.margin[0, 3] == 1.0, np.arange(D_MAX) < accepted[0, 3])


def test_traces_that_do_not_serve_are_refused() -> None:
    accepted = np.zeros((2, LONG), np.int64)
    with pytest.raises(InputError, match="cadence 'accepted', expected 'every'"):
        recorded.acceptance([trace(accepted, cadence="accepted")])
    with pytest.raises(InputError, match="d_max 3, expected 4"):
        recorded.acceptance([trace(accepted), trace(accepted, d_max=3)])
    with pytest.raises(InputError, match="5 positions in the shortest request"):
        recorded.acceptance([trace(accepted[:, :5])])


def test_area_under_the_curve_by_hand() -> None:
    """Of 2 x 2 pairs one is the right way round, two the wrong way and one is a tie."""
    assert schedulers.auc(np.array([1.0, 3.0, 3.0, 2.0]), np.array([True, True, False, False])) == (1 + 0.5) / 4
    assert schedulers.auc(np.arange(4.0), np.array([False, False, True, True])) == 1


def test_drafts_behind_a_rejection_say_nothing() -> None:
    """Accepted 1, 4, 0 of 4: tried are 2, 4 and 1 drafts, of which 1, 4 and 0 were accepted."""
    accepted = np.array([[1, 4, 0] * 4] * 2)
    of = [trace(accepted)]
    value, good = schedulers._tried(of, "margin")
    assert len(value) == len(good) == 2 * 4 * 7
    assert good.sum() == 2 * 4 * 5
    assert schedulers.signals(of) == {"top_probability": None, "margin": 1.0, "entropy": None, "outside": None}
    found = {m["above"]: (m["drafts"], m["accepted"]) for m in schedulers.by_margin(of)}
    assert found == {0.1: (16, 0.0), 0.8: (40, 1.0)}
