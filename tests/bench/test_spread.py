"""Intervals and percentiles, against values worked out by hand."""

from __future__ import annotations

import pytest

from bench import spread


def test_interval():
    # Mean 2, standard deviation 1, three values: t = 4.303 with 2 degrees of freedom.
    found = spread.interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2 and found["half"] == pytest.approx(4.303 / 3**0.5) and found["values"] == [1, 2, 3]
    assert spread.text(found) == "2.00 ± 2.48"
    assert spread.interval([5.0]) == {"mean": 5.0, "half": None, "values": [5.0]}
    assert spread.text(spread.interval([5.0]), 1) == "5.0"


def test_percentiles_count_each_value_by_its_weight():
    # Ninety tokens at 10 ms, nine at 20, one at 50.
    found = spread.percentiles([50.0, 10.0, 20.0], [1, 90, 9])
    assert found == {"median": 10.0, "p95": 20.0, "p99": 20.0}
    assert spread.percentiles([7.0], [3]) == {"median": 7.0, "p95": 7.0, "p99": 7.0}
