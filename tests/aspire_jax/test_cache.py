"""The paged cache: what is written is what the views show, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import cache as kv

from . import tiny

H, POOL, SIZE, D, B, P = 2, 14, 4, 6, 3, 4
RNG = np.random.default_rng(0)
PAGES = RNG.standard_normal((H, POOL, SIZE, D)).astype(np.float32)
TABLES = {
    "consecutive": np.arange(B * P).reshape(B, P).astype(np.int32),
    "shuffled": RNG.permutation(POOL)[: B * P].reshape(B, P).astype(np.int32),
    "shared": RNG.integers(0, POOL, (B, P)).astype(np.int32),
}


def ways(table: str) -> tuple[bool, ...]:
    return (False, True) if table == "consecutive" else (False,)


def by_hand(table: np.ndarray) -> np.ndarray:
    """[Hkv, B, S, D]: every row's tokens one by one."""
    out = np.empty((H, B, P * SIZE, D), np.float32)
    for row in range(B):
        for at in range(P * SIZE):
            out[:, row, at] = PAGES[:, table[row, at // SIZE], at % SIZE]
    return out


@pytest.mark.parametrize("table", TABLES)
def test_views_agree(table: str) -> None:
    t, want = TABLES[table], by_hand(TABLES[table])
    selection = np.array([[0, 3, -1], [2, 2, 1], [-1, -1, -1]], np.int32)
    compact = np.asarray(kv.selected_view(jnp.asarray(PAGES), jnp.asarray(t), jnp.asarray(selection)))
    by_page = want.reshape(H, B, P, SIZE, D)
    for row, at in zip(*np.nonzero(selection >= 0), strict=True):
        got = compact.reshape(H, B, 3, SIZE, D)[:, row, at]
        assert np.array_equal(got, by_page[:, row, selection[row, at]])
    assert np.isfinite(compact).all()
    block_view = jax.jit(kv.block_view, static_argnums=(2, 5))
    for consecutive in ways(table):
        assert np.array_equal(kv.rows_view(jnp.asarray(PAGES), jnp.asarray(t), consecutive), want)
        for row in range(B):
            for length in (SIZE, 3 * SIZE):
                for first in range(0, P * SIZE - length + 1, SIZE):
                    got = block_view(PAGES, t, consecutive, jnp.int32(row), jnp.int32(first), length)
                    assert np.array_equal(got, want[:, row, first : first + length])


@pytest.mark.parametrize("stacked", [False, True])
def test_write_puts_each_token_in_its_place_and_drops_what_is_out_of_range(stacked: bool) -> None:
    layers = 2
    old = RNG.standard_normal((layers, H, POOL, SIZE, D)).astype(np.float32)
    new = RNG.standard_normal((layers, 5, H, D)).astype(np.float32)
    page, offset = np.array([3, POOL, 0, 13, POOL + 9], np.int32), np.array([1, 2, 0, 3, 1], np.int32)
    want = old.copy()
    for t in (0, 2, 3):
        want[:, :, page[t], offset[t]] = new[:, t]
    leaves, tokens = (jnp.asarray(x) if stacked else tuple(jnp.asarray(y) for y in x) for x in (old, new))
    got = kv.write(leaves, tokens, jnp.asarray(page), jnp.asarray(offset))
    assert isinstance(got, tuple) != stacked
    assert np.array_equal(np.stack(got), want)


def test_write_rounds_to_the_caches_dtype() -> None:
    leaves = (jnp.zeros((H, 2, SIZE, D), jnp.bfloat16),)
    got = kv.write(leaves, (jnp.full((1, H, D), 1 / 3),), jnp.asarray([1]), jnp.asarray([2]))
    assert got[0].dtype == jnp.bfloat16
    assert np.all(np.asarray(got[0][:, 1, 2]) == jnp.bfloat16(1 / 3))


@pytest.mark.parametrize("unrolled", [False, True])
def test_leaves_of_layers(unrolled: bool) -> None:
    c = tiny.config(layers=3)
    leaves = kv.zeros(c, (POOL, SIZE), jnp.float32, unrolled)
    assert isinstance(leaves, tuple) == unrolled
    one = kv.leaf(leaves, 1 if unrolled else jnp.int32(1))
    assert one.shape == (c.n_kv_heads, POOL, SIZE, c.head_dim)
    if unrolled:
        changed = kv.replaced(leaves, 1, one + 1)
        assert [bool(np.asarray(x).any()) for x in changed] == [False, True, False]


def test_consecutive_table() -> None:
    assert np.asarray(kv.consecutive_table(2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
