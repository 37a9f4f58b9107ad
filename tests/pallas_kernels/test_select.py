"""Page selection, every implementation against sorting in Python."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

from .plain import EVERY, jitted


def by_sorting(mass: np.ndarray, pages: int, budget: int, recent: int) -> set[int]:
    """The recent pages first, then by score; of equals the one in front."""
    order = sorted(range(pages), key=lambda i: (i < pages - recent, -mass[i], i))
    return set(order[:budget])


@EVERY
@pytest.mark.parametrize(("size", "recent", "capacity"), [(50, 3, 12), (64, 1, 64), (7, 2, 5)])
def test_the_best_pages(size: int, recent: int, capacity: int, implementation: str) -> None:
    """Many equal scores, zeros, tiny ones and one that is infinite; more wanted than there is."""
    rng = np.random.default_rng(size)
    mass = np.round(rng.random((6, size)), 1).astype(np.float32)
    mass[1] *= np.float32(1e-30)
    mass[2] = 0
    mass[3, size // 2] = np.float32(3e38)
    pages = np.array([size, size - 1, size, size // 2 + 1, 1, 0], np.int32)
    budget = np.array([capacity, 2, capacity, 4, capacity, 3], np.int32)
    budget = np.minimum(budget, capacity)
    poisoned = np.where(np.arange(size)[None] < pages[:, None], mass, np.float32(np.nan)).astype(np.float32)
    call = jitted(pk.select_pages, recent=recent, capacity=capacity, implementation=implementation)
    got = np.asarray(call(jnp.asarray(poisoned), jnp.asarray(pages), jnp.asarray(budget)))
    assert got.shape == (6, capacity)
    for row in range(6):
        chosen = got[row][got[row] >= 0].tolist()
        assert (got[row] == -1).sum() == capacity - len(chosen)
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) == by_sorting(mass[row], int(pages[row]), int(budget[row]), recent)


@EVERY
def test_nothing_to_select(implementation: str) -> None:
    got = jitted(pk.select_pages, recent=1, capacity=0, implementation=implementation)(
        jnp.ones((2, 4)), jnp.ones(2, jnp.int32), jnp.zeros(2, jnp.int32)
    )
    assert got.shape == (2, 0)
