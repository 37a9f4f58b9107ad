"""Which pages ASPIRE's drafts may read, worked by hand from the paper's section 3."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax.attention.mixed import page_mass
from aspire_jax.context import NoContext, RefreshContext, Room, Scores, best_pages, pages_of

from . import tiny

CONFIG = tiny.config(layers=5)


def chosen(selection: Any) -> list[list[int]]:
    """The selected pages of every row, in order; none twice."""
    rows = [[int(p) for p in row if p >= 0] for row in np.asarray(selection)]
    assert all(len(set(row)) == len(row) for row in rows)
    return [sorted(row) for row in rows]


def select(policy: RefreshContext, mass: Any, lengths: Any, page_size: int = 4) -> list[list[int]]:
    mass = jnp.asarray(mass, jnp.float32)
    room = Room(mass.shape[1], page_size, 8, 2)
    state = policy.init(CONFIG, mass.shape[0], room)
    lengths = jnp.asarray(lengths, jnp.int32)
    state = policy.observe(state, Scores((3,), mass[None], jnp.ones((1, len(lengths)), bool), lengths))
    got = policy.select(state, lengths, room)
    assert got.shape == (1, len(lengths), policy.capacity(room))
    assert got.dtype == jnp.int32
    return chosen(got[0])


def test_last_pages_are_always_in_and_the_best_others_fill_the_budget() -> None:
    mass = [[0.1, 0.5, 0.0, 0.9, 0.2, 0.3, 0.0, 0.0, 9.0, 9.0]]
    policy = RefreshContext(k_min=4, recent=2, rho=0.0)
    assert select(policy, mass, [31]) == [[1, 3, 6, 7]]  # 8 pages: 6 and 7 for being last, 3 and 1 for their scores
    assert select(policy, mass, [32]) == [[1, 3, 6, 7]]
    assert select(policy, mass, [33]) == [[1, 3, 7, 8]]
    assert select(policy, mass, [40]) == [[1, 3, 8, 9]]


def test_a_context_shorter_than_the_budget_is_read_whole() -> None:
    policy = RefreshContext(k_min=6, recent=3, rho=0.5)
    mass = np.full((6, 10), 7.0)
    assert select(policy, mass, [0, 1, 4, 5, 23, 24]) == [
        [],
        [0],
        [0],
        [0, 1],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]


def test_pages_behind_the_context_are_never_selected() -> None:
    """Stale scores beyond the committed tokens must not matter, nor must pages without any score be left out."""
    mass = [[0.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0]]
    assert select(RefreshContext(k_min=3, recent=1), mass, [13]) == [[0, 1, 3]]


def test_ties_go_to_the_earliest_pages() -> None:
    assert select(RefreshContext(k_min=4, recent=1), np.full((1, 9), 0.25), [36]) == [[0, 1, 2, 8]]


def test_rows_do_not_mix() -> None:
    rng = np.random.default_rng(0)
    mass, lengths = rng.random((5, 12)), [48, 5, 30, 17, 44]
    policy = RefreshContext(k_min=3, recent=1, rho=0.4)
    together = select(policy, mass, lengths)
    assert together == [select(policy, mass[i : i + 1], lengths[i : i + 1])[0] for i in range(5)]


@pytest.mark.parametrize(("rho", "k_min", "recent"), [("0.07", 32, 8), ("0.1", 2, 1), ("0.5", 3, 3), ("1", 1, 1)])
def test_budget(rho: str, k_min: int, recent: int) -> None:
    """k = max(k_min, ceil(rho * P)) of P pages, computed in exact arithmetic, for every length up to 1000 pages.

    Where rho * P is a whole number, rounding may add the next page.
    """
    capacity, policy = 1000, RefreshContext(rho=float(rho), k_min=k_min, recent=recent)
    pages = np.arange(1, capacity + 1)
    mass = jax.random.uniform(jax.random.key(1), (capacity, capacity))
    room = Room(capacity, 16, 8, 2)
    state = policy.init(CONFIG, capacity, room).replace(mass=mass[None])
    got = np.asarray(jax.jit(policy.select, static_argnums=2)(state, jnp.asarray(pages * 16, jnp.int32), room)[0])
    counts = (got >= 0).sum(axis=1)
    for count, p in zip(counts, pages, strict=True):
        share = Fraction(rho) * int(p)
        want = min(max(k_min, math.ceil(share)), int(p))
        assert count == want or (share.denominator == 1 and count == want + 1 <= p)
    last = got.max(axis=1)
    assert np.array_equal(last, pages - 1)
    for i in range(recent):
        assert np.all(np.any(got == (pages - 1 - i)[:, None], axis=1) | (pages <= i))


@pytest.mark.parametrize("pages", [1, 5, 32, 33, 457, 458, 1000])
def test_capacity_holds_every_budget(pages: int) -> None:
    capacity = RefreshContext().capacity(Room(pages, 16, 8, 2))
    assert min(pages, 32) <= capacity <= pages
    assert capacity >= min(pages, math.ceil(Fraction("0.07") * pages))


def test_observe_takes_only_the_rows_measured_and_forget_clears() -> None:
    policy = RefreshContext(k_min=2, recent=1)
    state = policy.init(CONFIG, 3, Room(4, 4, 8, 2))
    lengths = jnp.full((3,), 16, jnp.int32)
    first, second = jnp.full((1, 3, 4), 0.25), jnp.full((1, 3, 4), 0.5)
    state = policy.observe(state, Scores((3,), first, jnp.array([[True, True, False]]), lengths))
    state = policy.observe(state, Scores((3,), second, jnp.array([[False, True, False]]), lengths))
    assert np.asarray(state.mass)[0, :, 0].tolist() == [0.25, 0.5, 0.0]
    assert np.asarray(policy.forget(state, jnp.array([True, False, False])).mass)[0, :, 0].tolist() == [0.0, 0.5, 0.0]


def test_best_pages_within_a_budget_of_each_row() -> None:
    mass = jnp.asarray(np.tile(np.arange(6.0)[::-1], (4, 1)), jnp.float32)
    got = best_pages(mass, jnp.array([6, 6, 6, 2]), jnp.array([1, 2, 4, 4]), 1, 4)
    assert chosen(got) == [[5], [0, 5], [0, 1, 2, 5], [0, 1]]


def test_pages_of() -> None:
    assert np.asarray(pages_of(jnp.array([0, 1, 15, 16, 17, 32]), 16)).tolist() == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("heads", ["max", "mean", "kv"])
def test_page_scores(heads: str) -> None:
    """Weight of each token over the heads, summed over its page, averaged over the first and the last query."""
    rng = np.random.default_rng(4)
    weights = rng.random((3, 2, 2, 5, 12)).astype(np.float32)  # [B, Q, Hkv, G, S]
    got = np.asarray(page_mass(jnp.asarray(weights), heads, 4))
    for b in range(3):
        for page in range(3):
            at = weights[b, ..., 4 * page : 4 * page + 4].astype(np.float64)  # [Q, Hkv, G, 4]
            token = {"max": at.max(axis=(1, 2)), "mean": at.mean(axis=(1, 2)), "kv": at.mean(axis=2)}[heads]
            np.testing.assert_allclose(got[b, ..., page], token.sum(axis=-1).mean(axis=0), rtol=1e-6)


def test_plan() -> None:
    plan = RefreshContext(renew="step").plan(CONFIG)
    assert (plan.verify_layers, plan.refresh_layers, plan.heads) == ((3,), (3,), "max")
    assert (plan.sets, plan.n_sets, plan.renew) == ((0,) * 5, 1, "step")
    spared = RefreshContext(renew="verification", layers=(1,)).plan(CONFIG)
    assert (spared.verify_layers, spared.refresh_layers, spared.renew) == ((1,), (), "verification")
    assert RefreshContext().plan(tiny.config(layers=1)).verify_layers == (0,)
    assert NoContext().capacity(Room(100, 16, 8, 2)) == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rho": -0.1}, "rho: -0.1"),
        ({"rho": 1.5}, "rho: 1.5"),
        ({"recent": 0}, "recent: 0"),
        ({"k_min": 4, "recent": 5}, r"recent: 5, expected 1 to k_min \(4\)"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        RefreshContext(**fields)


def test_a_layer_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="layers: 5, expected 0 to 4"):
        RefreshContext(layers=(5,)).plan(CONFIG)
