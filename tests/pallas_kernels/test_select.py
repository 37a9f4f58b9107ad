"""Page selection, every implementation against sorting in Python."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import select

from .plain import EVERY, jitted, same


def by_sorting(rank: np.ndarray, budget: int) -> set[int]:
    """By rank, the negative ones never; of equals the one in front."""
    order = sorted((i for i in range(len(rank)) if rank[i] >= 0), key=lambda i: (-rank[i], i))
    return set(order[:budget])


@EVERY
@pytest.mark.parametrize(("size", "recent", "capacity"), [(50, 3, 12), (64, 1, 64), (7, 2, 5)])
def test_the_best_pages(size: int, recent: int, capacity: int, implementation: str) -> None:
    """Many equal scores, zeros, tiny ones and one that is large; more wanted than there is.

    The recent pages come first, at infinity. Rows lie on two axes.
    """
    rng = np.random.default_rng(size)
    rank = np.round(rng.random((6, size)), 1).astype(np.float32)
    rank[1] *= np.float32(1e-30)
    rank[2] = 0
    rank[3, size // 2] = np.float32(3e38)
    pages = np.array([size, size - 1, size, size // 2 + 1, 1, 0], np.int32)
    index = np.arange(size)[None]
    rank[index >= pages[:, None] - recent] = np.inf
    rank[np.broadcast_to(index, rank.shape) >= pages[:, None]] = -1
    budget = np.array([capacity, 2, capacity, 4, capacity, 3], np.int32)
    call = jitted(pk.select_pages, capacity=capacity, implementation=implementation)
    args = (jnp.asarray(rank).reshape(2, 3, size), jnp.asarray(budget).reshape(2, 3))
    got = call(*args)
    assert got.shape == (2, 3, capacity)
    assert same(call(*args), got)
    for row, found in enumerate(np.asarray(got).reshape(6, capacity)):
        chosen = found[found >= 0].tolist()
        assert (found == -1).sum() == capacity - len(chosen)
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) == by_sorting(rank[row], min(int(budget[row]), capacity))


@EVERY
def test_nothing_to_select(implementation: str) -> None:
    got = jitted(pk.select_pages, capacity=0, implementation=implementation)(jnp.ones((2, 4)), jnp.zeros(2, jnp.int32))
    assert got.shape == (2, 0)


def test_rows_of_very_many_pages_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row must fit into a program's registers; no kernel is called where it does not."""
    monkeypatch.setattr(select, "MOST_PAGES", 4)
    monkeypatch.setattr(select, "call", None)
    got = pk.select_pages(jnp.arange(5.0)[None], jnp.array([2]), capacity=2, implementation="interpret")
    assert set(np.asarray(got)[0].tolist()) == {4, 3}
