"""Attention in parts against plain attention in float64, on random shapes, page tables and lengths."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax.attention import xla
from aspire_jax.attention.softmax import (
    MASKED,
    Partial,
    attend,
    attend_keeping,
    log_sum_exp,
    merge,
    normalise,
    scores_of,
)

TOLERANCE = 1e-5


class Case(NamedTuple):
    """Sizes: rows, queries a row, KV heads, group, head_dim, page size, pages a row, keys a block in pages."""

    b: int
    q: int
    h: int
    g: int
    d: int
    size: int
    pages: int
    block: int
    scale: float = 1.0  # of the queries: large ones overflow a softmax that does not subtract its maximum


CASES = [
    Case(4, 1, 2, 3, 16, 4, 7, 3),
    Case(5, 3, 1, 8, 64, 8, 5, 2, scale=30.0),
    Case(4, 2, 3, 1, 96, 16, 3, 3),
    Case(6, 5, 2, 2, 16, 2, 9, 4),
    Case(1, 17, 1, 5, 64, 4, 6, 5, scale=30.0),
]
TABLES = ["consecutive", "shuffled", "shared"]


class Data(NamedTuple):
    case: Case
    q: np.ndarray  # [B, Q, Hkv, G, D]
    k: np.ndarray  # [Hkv, pages, page_size, D]
    v: np.ndarray
    table: np.ndarray  # [B, P]
    lengths: np.ndarray  # [B]


def draw(case: Case, table: str, seed: int = 0) -> Data:
    rng = np.random.default_rng([seed, CASES.index(case)])
    pool = case.b * case.pages + 3  # pages nobody owns lie behind those of the rows
    q = case.scale * rng.standard_normal((case.b, case.q, case.h, case.g, case.d))
    k, v = rng.standard_normal((2, case.h, pool, case.size, case.d))
    own = np.arange(case.b * case.pages).reshape(case.b, case.pages)
    if table == "shuffled":
        own = rng.permutation(pool)[: own.size].reshape(own.shape)
    if table == "shared":
        own = rng.integers(0, pool, own.shape)
    full = case.pages * case.size
    edges = [0, 1, case.size, full, full - 1, case.size + 1, case.block * case.size, rng.integers(0, full)]
    lengths = np.array(rng.permutation(edges)[: case.b])
    if case.b == 1:
        lengths[:] = full - 1
    return Data(case, *(x.astype(np.float32) for x in (q, k, v)), own.astype(np.int32), lengths.astype(np.int32))


def rows_of(pages: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[B, Hkv, S, D] float64."""
    picked = pages.astype(np.float64)[:, table]  # [Hkv, B, P, size, D]
    return np.moveaxis(picked.reshape(pages.shape[0], table.shape[0], -1, pages.shape[-1]), 1, 0)


def plain(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, log-sum-exp and weights of q [..., D] over k, v [..., S, D], visible [..., S]; float64."""
    scores = np.einsum("...d,...sd->...s", q.astype(np.float64), k) * q.shape[-1] ** -0.5
    scores = np.where(visible, scores, -np.inf)
    top = np.max(scores, axis=-1, initial=-1e300, keepdims=True)
    raw = np.exp(scores - top)
    total = raw.sum(-1, keepdims=True)
    weights = np.divide(raw, total, out=np.zeros_like(raw), where=total > 0)
    lse = np.where(total > 0, top + np.log(np.where(total > 0, total, 1.0)), np.inf)[..., 0]
    return np.einsum("...s,...sd->...d", weights, v), lse, weights


def by_rows(data: Data) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`plain` of every row over its committed tokens, [B, Q, Hkv, G, ...]."""
    k, v = (rows_of(x, data.table)[:, None, :, None] for x in (data.k, data.v))
    visible = np.arange(k.shape[-2]) < data.lengths[:, None, None, None, None]
    return plain(data.q, k, v, visible)


def close(got: Any, want: np.ndarray) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= TOLERANCE * np.linalg.norm(want)


def check(part: Partial, out: np.ndarray, lse: np.ndarray) -> None:
    """Outputs agree, and rows without a key say so."""
    empty = np.isinf(lse)
    got = np.asarray(log_sum_exp(part))
    assert np.array_equal(np.isposinf(got), empty)
    close(np.where(empty, 0, got), np.where(empty, 0, lse))
    close(normalise(part), out)
    assert not np.asarray(part.out)[empty].any()
    assert np.all(np.asarray(part.top)[empty] == MASKED)
    assert not np.asarray(part.total)[empty].any()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_over_rows(case: Case, table: str) -> None:
    data = draw(case, table)
    over_rows = jax.jit(xla.over_rows, static_argnums=5)
    out, lse, _ = by_rows(data)
    check(over_rows(*data[1:], False), out, lse)
    if table == "consecutive":
        check(over_rows(*data[1:], True), out, lse)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_over_tiles(case: Case) -> None:
    """Rows of different query counts, cut into tiles that do not divide them; the last block reaches back."""
    size = 2
    queries = np.random.default_rng(3).integers(0, case.q + 1, case.b).astype(np.int32)
    queries[-1] = case.q
    most = case.b + case.b * case.q // size

    def tiled(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array, consecutive: bool) -> Any:
        tiles = xla.tile(jnp.asarray(queries), lengths, size, most)
        place = jnp.minimum(tiles.first[:, None] + jnp.arange(size)[None], case.q - 1)
        last = jnp.clip(jnp.asarray(queries)[tiles.row] - 1 - tiles.first, 0, size - 1)
        kept = xla.first_and_last(last, case.g)
        args = (k, v, table, tiles, case.block * case.size, consecutive, kept, case.size)
        return tiles, *xla.over_tiles(q[tiles.row[:, None], place], *args)

    f = jax.jit(tiled, static_argnums=5)
    for table, consecutive in (("consecutive", True), *((t, False) for t in TABLES)):
        data = draw(case, table)
        out, lse, weights = by_rows(data)
        lengths = np.where(queries > 0, data.lengths, 0).astype(np.int32)
        tiles, part, seen, k, v = f(*data[1:5], lengths, consecutive)
        assert np.array_equal(k, data.k)
        assert np.array_equal(v, data.v)
        for row in range(case.b):
            i = np.arange(queries[row])
            tile, place = np.asarray(tiles.of_row)[row] + i // size, i % size
            check(Partial(*(np.asarray(x)[tile, place] for x in part)), out[row][i], lse[row][i])
            for j in (0, queries[row] - 1) if queries[row] else ():  # its first query, and its last
                t, at = tile[j], int(j > 0)
                got = np.asarray(seen)[t].reshape(case.h, 2, case.g, -1)[:, at]  # [Hkv, G, P] of the tile's own scale
                scale = np.exp(np.asarray(part.top)[t, place[j]] - np.nan_to_num(lse[row][j], neginf=np.inf))
                got = got * scale[..., None]
                want = weights[row][j].reshape(case.h, case.g, -1, case.size).sum(axis=-1)
                np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
        unused = np.asarray(tiles.keys) == 0
        assert not np.asarray(part.total)[unused].any()


def test_tiles_are_in_row_order_and_bounded() -> None:
    queries, lengths = np.array([5, 0, 1, 4], np.int32), np.array([9, 8, 7, 6], np.int32)
    tiles = xla.tile(jnp.asarray(queries), jnp.asarray(lengths), 4, 7)
    assert np.asarray(tiles.row)[:4].tolist() == [0, 0, 2, 3]
    assert np.asarray(tiles.first)[:4].tolist() == [0, 4, 0, 0]
    assert np.asarray(tiles.keys).tolist() == [9, 9, 7, 6, 0, 0, 0]
    assert np.asarray(tiles.of_row).tolist() == [0, 2, 2, 3]


def test_no_work_is_no_work() -> None:
    data = draw(CASES[0], "consecutive")

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, nothing: jax.Array) -> tuple[Partial, Partial]:
        tiles = xla.tile(nothing, nothing, 2, 3)
        part = xla.over_tiles(jnp.ones((3, 2, *q.shape[2:])), k, v, table, tiles, 8, True)[0]
        return xla.over_rows(q, k, v, table, nothing, True), part

    for p in both(*data[1:5], np.zeros(CASES[0].b, np.int32)):
        assert not np.asarray(p.total).any()
        assert not np.asarray(normalise(p)).any()
        assert np.all(np.asarray(log_sum_exp(p)) == np.inf)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_over_context(case: Case) -> None:
    rng = np.random.default_rng(5)
    q = rng.standard_normal((case.b, case.h, case.g, case.d)).astype(np.float32)
    k, v = rng.standard_normal((2, case.h, case.b, 13, case.d)).astype(np.float32)
    visible = rng.random((case.b, 13)) < 0.5
    visible[0] = False
    visible[-1, 4] = True
    out, lse, _ = plain(
        q, *(np.moveaxis(x, 1, 0)[:, :, None].astype(np.float64) for x in (k, v)), visible[:, None, None]
    )
    check(jax.jit(xla.over_context)(q, k, v, visible), out, lse)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_over_new(case: Case, tokens: int) -> None:
    """Few and many queries take different products (see `scores_of`)."""
    rng = np.random.default_rng(6)
    q = rng.standard_normal((tokens, case.h, case.g, case.d)).astype(np.float32)
    k, v = rng.standard_normal((2, tokens, case.h, case.d)).astype(np.float32)
    visible = np.tril(rng.random((tokens, tokens)) < 0.7)
    visible[0] = False
    wide = (x.swapaxes(0, 1)[None, :, None].astype(np.float64) for x in (k, v))
    out, lse, _ = plain(q, *wide, visible[:, None, None])
    check(jax.jit(xla.over_new)(q, k, v, visible), out, lse)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_of(case: Case, table: str) -> None:
    """Weights under the denominator of more keys than those in the cache."""
    data = draw(case, table)
    weights_of = jax.jit(xla.weights_of, static_argnums=5)
    _, lse, weights = by_rows(data)
    wider = np.logaddexp(lse, 0.5)
    share = np.exp(np.where(np.isinf(lse), 0, lse) - np.where(np.isinf(wider), 0, wider))[..., None]
    for consecutive in (False, True) if table == "consecutive" else (False,):
        for given, want in ((lse, weights), (wider, weights * share)):
            got = np.asarray(
                weights_of(data.q, given.astype(np.float32), data.k, data.table, data.lengths, consecutive)
            )
            assert got.min() >= 0
            # A weight is the exponential of a score whose rounding error grows with its size.
            assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)
            assert not got[data.lengths == 0].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_kept_from_attention(case: Case) -> None:
    """Those of each row's first and last query, under the denominator of more keys than those in the cache."""
    data = draw(case, "shuffled")
    last = np.random.default_rng(3).integers(0, case.q, case.b).astype(np.int32)
    keeping = jax.jit(xla.over_rows_keeping, static_argnums=(5, 7))
    part, seen = keeping(data.q, data.k, data.v, data.table, data.lengths, False, last)
    out, lse, weights = by_rows(data)
    check(part, out, lse)
    wider = np.logaddexp(lse, 0.5)
    share = np.exp(np.where(np.isinf(lse), 0, lse) - np.where(np.isinf(wider), 0, wider))[..., None]
    rows = np.arange(case.b)
    ends = [np.stack([x[rows, 0], x[rows, last]], axis=1) for x in (wider, weights * share)]
    got = np.asarray(seen.of(jnp.asarray(ends[0], jnp.float32)))
    assert got.shape == (case.b, 2, case.h, case.g, case.pages * case.size)
    assert np.linalg.norm(got - ends[1]) <= 1e-4 * np.linalg.norm(ends[1])
    assert not got[data.lengths == 0].any()
    part, seen = keeping(data.q, data.k, data.v, data.table, data.lengths, False, last, case.size)
    check(part, out, lse)
    pages = np.asarray(seen.of(jnp.asarray(ends[0], jnp.float32)))
    np.testing.assert_allclose(pages, got.reshape(*got.shape[:-1], -1, case.size).sum(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("parts", [2, 4])
def test_merged_parts_are_the_whole(parts: int) -> None:
    """Also where a part sees no key, and where the scores of the parts lie far apart."""
    rng = np.random.default_rng(8)
    q, (k, v) = rng.standard_normal((2, 6, 16)), rng.standard_normal((2, 2, 24, 16))
    q[1] *= 60
    visible = rng.random((2, 6, 24)) < 0.5
    visible[:, :3, :12] = False
    visible[0, 0] = False
    out, lse, _ = plain(q, k[:, None], v[:, None], visible)
    cut = np.split(np.arange(24), parts)
    args = [x.astype(np.float32) for x in (q, k, v)]
    done = [attend(args[0], args[1][:, i], args[2][:, i], visible[:, :, i]) for i in cut]
    check(merge(*done), out, lse)
    check(merge(*reversed(done)), out, lse)
    check(merge(merge(done[0], done[1]), *done[2:]), out, lse)


def test_merge_with_nothing_changes_nothing() -> None:
    part = attend(*(jnp.ones((1, 3, 8)) for _ in range(3)), jnp.ones((1, 3, 3), bool))
    nothing = Partial(jnp.zeros_like(part.out), jnp.full_like(part.top, MASKED), jnp.zeros_like(part.total))
    for a, b in zip(merge(nothing, part), part, strict=True):
        assert np.array_equal(a, b)
    assert not np.asarray(merge(nothing, nothing).total).any()


@pytest.mark.parametrize("queries", [1, 63, 64, 100])
def test_scores_do_not_depend_on_the_product_chosen(queries: int) -> None:
    rng = np.random.default_rng(9)
    q, k = rng.standard_normal((2, queries, 32)), rng.standard_normal((2, 9, 32))
    got = jax.jit(scores_of)(q.astype(np.float32), k.astype(np.float32))
    close(got, np.einsum("bnd,bsd->bns", q.astype(np.float32), k.astype(np.float32)) * 32**-0.5)


@pytest.mark.parametrize("each", [False, True], ids=["one mask", "a mask each"])
@pytest.mark.parametrize("queries", [9, 10, 12, 63, 64])
def test_attention_does_not_depend_on_the_form_chosen(queries: int, each: bool) -> None:
    """Over long keys: the output, and the weights, which are those of no key at all where none is visible."""
    rng = np.random.default_rng(10)
    q, k, v = rng.standard_normal((2, queries, 32)), *rng.standard_normal((2, 2, 300, 32))
    visible = rng.random((2, queries if each else 1, 300)) < 0.5
    visible[1, 0] = False
    kept = np.array([[queries - 1, 1, 1]], np.int32)
    part, weights = jax.jit(attend_keeping)(*(x.astype(np.float32) for x in (q, k, v)), visible, kept)
    q, k, v = (x.astype(np.float32).astype(np.float64) for x in (q, k, v))
    scores = np.where(visible, np.einsum("bnd,bsd->bns", q, k) * 32**-0.5, -np.inf)
    some = np.broadcast_to(visible.any(axis=-1), scores.shape[:2])
    with np.errstate(invalid="ignore", divide="ignore"):
        exact = np.where(some[..., None], np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
        expected = np.where(some[..., None], exact @ v / exact.sum(axis=-1, keepdims=True), 0.0)
    close(normalise(part), expected)
    assert not np.asarray(part.total)[~some].any()
    seen = some[:, kept[0]]
    close(np.asarray(weights)[seen], exact[:, kept[0]][seen])
    by_pages = jax.jit(functools.partial(attend_keeping, page=20))
    paged, pages = by_pages(*(x.astype(np.float32) for x in (q, k, v)), visible, kept)
    close(normalise(paged), expected)
    close(np.asarray(pages)[seen], exact[:, kept[0]].reshape(2, 3, 15, 20).sum(-1)[seen])


def test_bfloat16_accumulates_in_float32() -> None:
    data = draw(CASES[2], "shuffled")
    low = [jnp.asarray(x).astype(jnp.bfloat16) for x in data[1:4]]
    rounded = Data(data.case, *(np.asarray(x.astype(jnp.float32)) for x in low), data.table, data.lengths)
    out, lse, _ = by_rows(rounded)
    part = jax.jit(xla.over_rows, static_argnums=5)(*low, data.table, data.lengths, False)
    assert part.out.dtype == jnp.float32
    check(part, out, lse)
