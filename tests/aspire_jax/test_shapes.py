"""Step shapes: every step some policy may ask for fits one, and its cost grows with what it does."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax.shapes import COPY_READS, LOOP_PENALTY, Shape, Shapes, stairs

DRAWS = 3000


def shapes(**fields: Any) -> Shapes:
    base = {"batch": 4, "d_max": 3, "capacity": 64, "block": 16, "dense": True, "refreshes": 0.25, "mixed": True}
    return Shapes(**{**base, **fields})


KINDS = [
    shapes(batch=batch, d_max=d_max, dense=dense, mixed=mixed)
    for (batch, d_max), dense, mixed in itertools.product(
        [(1, 1), (4, 0), (4, 3), (3, 7), (8, 16)], (True, False), (True, False)
    )
]
KINDS += [shapes(batch=batch, d_max=d_max, dense=False, width=16) for batch, d_max in [(1, 1), (3, 7), (8, 16)]]


def name(s: Shapes) -> str:
    return f"{s.batch}x{s.d_max}{' dense' * s.dense}{' mixed' * s.mixed}{' by width' * (s.width is not None)}"


def steps(s: Shapes, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random steps: who drafts [N, B], queries [N, B], lengths [N, B]. Rows mix only where they may."""
    rng = np.random.default_rng(seed)
    size = (DRAWS, s.batch)
    drafting = rng.random(size) < rng.random((DRAWS, 1)) if s.d_max else np.zeros(size, bool)
    if not s.mixed:
        drafting = np.broadcast_to(drafting[:, :1], size)
    most = rng.integers(1, s.d_max + 2, (DRAWS, 1))
    queries = np.where(drafting, 1, rng.integers(1, most + 1, size))
    idle = rng.random(size) < rng.choice([0, 0.3, 0.9], (DRAWS, 1))
    queries = np.where(idle, 0, queries)
    queries[: DRAWS // 20] = np.where(drafting[: DRAWS // 20], 1, s.d_max + 1)  # the widest
    lengths = rng.integers(0, s.capacity, size)
    return drafting & (queries > 0), queries.astype(np.int32), lengths.astype(np.int32)


def fits(shape: Shape, drafting: np.ndarray, queries: np.ndarray) -> bool:
    verifying = (queries > 0) & ~drafting
    if shape.kind == "draft":
        return not verifying.any()
    if shape.kind == "dense":
        return not drafting.any() and queries.max() <= shape.queries
    return queries.sum() <= shape.tokens and queries.max() <= shape.queries


@pytest.mark.parametrize("s", KINDS, ids=name)
def test_every_step_fits_the_shape_chosen(s: Shapes) -> None:
    drafting, queries, lengths = steps(s)
    chosen = np.asarray(jax.jit(jax.vmap(s.choose))(drafting, queries, lengths))
    for index, d, q in zip(chosen, drafting, queries, strict=True):
        assert fits(s.all[index], d, q), (s.all[index], d, q)


@pytest.mark.parametrize("s", KINDS, ids=name)
def test_no_narrower_shape_of_the_kind_would_do(s: Shapes) -> None:
    drafting, queries, lengths = steps(s, seed=1)
    chosen = np.asarray(jax.jit(jax.vmap(s.choose))(drafting, queries, lengths))
    for index, d, q in zip(chosen, drafting, queries, strict=True):
        taken = s.all[index]
        others = [x for x in s.all if x.kind == taken.kind and fits(x, d, q)]
        assert taken.tokens == min(x.tokens for x in others)


def test_rows_drafting_together_never_take_a_wider_form() -> None:
    s = shapes()
    ones = jnp.ones((4,), jnp.int32)
    assert s.all[int(s.choose(ones > 0, ones, ones))].kind == "draft"


def test_few_short_rows_verify_in_the_loop_and_long_ones_in_one_product() -> None:
    s = shapes()
    for lengths, queries, kind in (
        ([64, 64, 64, 64], [2, 2, 2, 2], "dense"),
        ([40, 40, 40, 40], [2, 2, 2, 2], "dense"),
        ([64, 64, 64, 64], [2, 0, 0, 0], "packed"),
        ([5, 5, 5, 5], [1, 1, 1, 1], "packed"),
    ):
        index = s.choose(jnp.zeros((4,), bool), jnp.asarray(queries, jnp.int32), jnp.asarray(lengths, jnp.int32))
        assert s.all[int(index)].kind == kind


@pytest.mark.parametrize("s", KINDS, ids=name)
def test_work_of_a_shape_grows_with_what_is_done(s: Shapes) -> None:
    """In the same shape: longer contexts, more queries, larger selections and a copy never cost less."""
    drafting, queries, lengths = steps(s, seed=2)
    rng = np.random.default_rng(3)
    index = np.asarray(jax.jit(jax.vmap(s.choose))(drafting, queries, lengths))
    selected = (rng.random(lengths.shape) * lengths).astype(np.float32)
    work = jax.jit(jax.vmap(s.work))
    no = np.zeros(DRAWS, bool)
    base = np.asarray(work(index, drafting, queries, lengths, selected, no))
    assert np.all(base >= 0)
    assert np.all(base[:, 0] == 1)
    width = s.width or 1
    turns = -(-queries.sum(axis=1) // width) * width
    assert np.array_equal(base[:, 1], turns if s.width else [s.all[i].tokens for i in index])
    more_queries = queries + (~drafting & (queries > 0)).astype(np.int32)
    for changed in (
        (drafting, queries, lengths + 7, selected, no),
        (drafting, more_queries, lengths, selected, no),
        (drafting, queries, lengths, selected + 3, no),
        (drafting, queries, lengths, selected, ~no),
    ):
        assert np.all(np.asarray(work(index, *changed)) >= base)


@pytest.mark.parametrize("s", [k for k in KINDS if k.d_max], ids=name)
def test_verifying_more_tokens_in_every_row_never_forecasts_less(s: Shapes) -> None:
    """What the schedulers compare: the same rows with one more draft each."""
    _, _, lengths = steps(s, seed=4)
    forecast = jax.jit(jax.vmap(s.forecast))
    nobody, before = np.zeros(lengths.shape, bool), None
    for g in range(s.d_max + 1):
        queries = np.full(lengths.shape, g + 1, np.int32)
        work = np.asarray(forecast(nobody, queries, lengths, lengths.astype(np.float32)))
        assert before is None or np.all(work >= before)
        before = work


def test_work_by_hand() -> None:
    s = shapes()
    lengths, selected = jnp.array([10, 20, 33, 64]), jnp.array([4.0, 8.0, 12.0, 16.0])
    yes, no = jnp.ones((4,), bool), jnp.zeros((4,), bool)
    kinds = {(x.kind, x.tokens): i for i, x in enumerate(s.all)}
    ones = jnp.ones((4,), jnp.int32)
    once = jnp.asarray(False)
    drafts = 4 + 8 + 12 + 16 + 0.25 * (10 + 20 + 33 + 64)
    np.testing.assert_allclose(s.work(kinds["draft", 4], yes, ones, lengths, selected, once), [1, 4, drafts, drafts])
    np.testing.assert_allclose(s.work(kinds["dense", 8], no, 2 * ones, lengths, selected, once), [1, 8, 256, 512])
    mixed, queries = jnp.array([True, False, False, False]), jnp.array([1, 0, 2, 3])
    read = 4 + 0.25 * 10 + LOOP_PENALTY * (48 + 64)
    pairs = 4 + 0.25 * 10 + LOOP_PENALTY * (2 * 48 + 3 * 64)
    np.testing.assert_allclose(s.work(kinds["packed", 8], mixed, queries, lengths, selected, once), [1, 8, read, pairs])
    bare = dataclasses.replace(s, dense=False)
    index = next(i for i, x in enumerate(bare.all) if x.tokens == 8)
    np.testing.assert_allclose(bare.work(index, mixed, queries, lengths, selected, once), [1, 8, 6.5 + 112, 6.5 + 288])
    copy = [0, 0, COPY_READS * 40, 0]
    np.testing.assert_allclose(s.copy(selected), copy)
    with_copy = s.work(kinds["draft", 4], yes, ones, lengths, selected, jnp.asarray(True))
    np.testing.assert_allclose(with_copy, np.array([1, 4, drafts, drafts]) + copy)


def test_stairs() -> None:
    assert stairs((1, 2, 4, 9), 4) == (1, 2, 4)
    assert stairs((1, 2, 4, 9), 5) == (1, 2, 4, 5)
    assert stairs((1, 2), 1) == (1,)


def test_the_shapes_are_few_and_each_kind_is_sorted() -> None:
    for s in KINDS:
        assert len(set(s.all)) == len(s.all) <= 15
        for kind in ("draft", "dense", "packed"):
            widths = [x.tokens for x in s.all if x.kind == kind]
            assert widths == sorted(widths)
        assert all(x.queries <= s.d_max + 1 for x in s.all)
