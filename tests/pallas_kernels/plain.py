"""Random inputs for the kernels, poisoned wherever they may not read, and attention in float64 that only loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

EVERY = pytest.mark.parametrize("implementation", ["xla", "interpret"])
# Weights meet values in the values' dtype, as a tensor core wants them; everything else accumulates in float32.
ROUNDING = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 8e-4}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes: rows, most queries a row, KV heads, group, head_dim, page size, pages a row."""

    b: int
    q: int
    h: int
    g: int
    d: int
    size: int
    pages: int
    dtype: str = "float32"
    layers: int = 2
    tile_rows: int | None = None

    def __str__(self) -> str:
        return "-".join(str(x) for x in dataclasses.astuple(self))


class Data(NamedTuple):
    case: Case
    q: np.ndarray  # [T, Hkv, G, D]
    k: np.ndarray  # [L, Hkv, N, size, D]
    v: np.ndarray
    table: np.ndarray  # [B, n]
    counts: np.ndarray  # [B, n], or both [B, Hkv, n]
    used: np.ndarray  # [B]
    first: np.ndarray  # [B]
    queries: np.ndarray  # [B]
    new_k: np.ndarray  # [T, Hkv, D]
    new_v: np.ndarray
    tail_k: np.ndarray  # [L, Hkv, B, tail, D]
    tail_v: np.ndarray
    tail: np.ndarray  # [B]

    @property
    def lists(self) -> pk.PageLists:
        return pk.PageLists(*(jnp.asarray(x) for x in (self.table, self.counts, self.used)))

    @property
    def rows(self) -> pk.QueryRows:
        return pk.QueryRows(jnp.asarray(self.first), jnp.asarray(self.queries))

    @property
    def new(self) -> pk.NewTokens:
        return pk.NewTokens(self.low(self.new_k), self.low(self.new_v))

    @property
    def tails(self) -> pk.Tail:
        return pk.Tail(*self.new, self.low(self.tail_k), self.low(self.tail_v), jnp.asarray(self.tail))

    def low(self, x: np.ndarray) -> jax.Array:
        """In the case's dtype."""
        return jnp.asarray(x).astype(self.case.dtype)


LAYER = 1


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x.astype(np.float32)).astype(dtype).astype(jnp.float32))


def draw(
    case: Case, queries: Any, lengths: Any, *, holes: bool = False, heads: bool = False, tail: int = 4, seed: int = 0
) -> Data:
    """Rows with the given query counts and committed tokens over shuffled tables.

    With `holes`, lists skip pages, repeat pages of other rows and are in no order; with `heads`, each KV head has its
    own. Everything a call may not read is
    NaN, and page numbers it may not follow point out of the pool.
    """
    c, rng = case, np.random.default_rng([seed, case.b, case.q, case.d])
    queries, lengths = np.array(queries, np.int32), np.array(lengths, np.int32)
    pool = c.b * c.pages + 2
    table = rng.permutation(pool)[: c.b * c.pages].reshape(c.b, c.pages)
    counts = np.clip(lengths[:, None] - np.arange(c.pages)[None] * c.size, 0, c.size)
    table, counts = (np.repeat(x[:, None], c.h if heads else 1, axis=1) for x in (table, counts))
    if holes:
        table = rng.integers(0, pool, table.shape)
        counts = rng.permuted(np.where(rng.random(counts.shape) < 0.3, 0, counts), axis=2)
    entries = np.arange(1, c.pages + 1)
    used = np.max(np.where(counts > 0, entries, 0), axis=(1, 2))
    used[queries == 0] = 0
    k, v = (np.full((c.layers, c.h, pool, c.size, c.d), np.nan) for _ in range(2))
    for row, head, entry in np.argwhere(counts > 0):
        if queries[row]:
            place = (LAYER, head if heads else slice(None), table[row, head, entry], slice(counts[row, head, entry]))
            k[place], v[place] = rng.standard_normal((2, *k[place].shape))
    table = np.where(counts > 0, table, np.where(rng.random(table.shape) < 0.5, 10**6, -5))
    # Rows lie in no order among the packed tokens, with unowned ones between and behind them.
    first = np.zeros(c.b, np.int32)
    at = 1
    for row in rng.permutation(c.b):
        first[row] = at
        at += queries[row] + rng.integers(0, 2)
    tokens = int(at) + 2
    q = np.full((tokens, c.h, c.g, c.d), np.nan)
    new_k, new_v = (np.full((tokens, c.h, c.d), np.nan) for _ in range(2))
    for row in range(c.b):
        mine = slice(first[row], first[row] + queries[row])
        q[mine] = 2 * rng.standard_normal(q[mine].shape)
        new_k[mine], new_v[mine] = rng.standard_normal((2, *new_k[mine].shape))
    tail_k, tail_v = (np.full((c.layers, c.h, c.b, tail, c.d), np.nan) for _ in range(2))
    count = np.arange(c.b, dtype=np.int32) % (tail + 1)
    for row in range(c.b):
        place = (LAYER, slice(None), row, slice(count[row]))
        tail_k[place], tail_v[place] = rng.standard_normal((2, c.h, count[row], c.d))
    floats = [rounded(x, c.dtype) for x in (q, k, v, new_k, new_v, tail_k, tail_v)]
    if not heads:
        table, counts = table[:, 0], counts[:, 0]
    ints = [x.astype(np.int32) for x in (table, counts, used, first, queries)]
    return Data(c, *floats[:3], *ints, *floats[3:], count)


def keys_of(data: Data, row: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values of a row's list, of each KV head [S, D], float64."""
    found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for head in range(data.case.h):
        table, counts = (x[row, head] if x.ndim == 3 else x[row] for x in (data.table, data.counts))
        for out, pages in zip(found, (data.k, data.v), strict=True):
            parts = [pages[LAYER, head, table[e], : counts[e]] for e in range(data.used[row]) if counts[e]]
            out.append(np.concatenate([np.zeros((0, data.case.d)), *parts]).astype(np.float64))
    return found


def softmax(q: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights [G, S] and log-sum-exp [G] of one KV head's q [G, D] over keys [S, D]."""
    scores = q.astype(np.float64) @ keys.T * q.shape[-1] ** -0.5
    top = scores.max(-1, keepdims=True)
    raw = np.exp(scores - top)
    return raw / raw.sum(-1, keepdims=True), (top + np.log(raw.sum(-1, keepdims=True)))[..., 0]


def queries_of(data: Data) -> Iterator[tuple[int, int, int]]:
    """Every (row, query, packed index)."""
    for row in range(data.case.b):
        for i in range(data.queries[row]):
            yield row, i, int(data.first[row] + i)


def attention(data: Data, drafts: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, log-sum-exps, and which packed tokens have any."""
    out, lse = np.zeros(data.q.shape), np.zeros(data.q.shape[:-1])
    owned = np.zeros(data.q.shape[0], bool)
    for row, i, at in queries_of(data):
        for head, (keys, values) in enumerate(zip(*keys_of(data, row), strict=True)):
            if drafts:
                mine = (LAYER, head, row, slice(data.tail[row]))
                near = [np.concatenate([t[mine], x[[at], head]]) for t, x in _pairs(data)]
            else:
                near = [x[at - i : at + 1, head] for x in (data.new_k, data.new_v)]
            weights, lse[at, head] = softmax(data.q[at, head], np.concatenate([keys, near[0]]))
            out[at, head] = weights @ np.concatenate([values, near[1]])
        owned[at] = True
    return out, lse, owned


def _pairs(data: Data) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(data.tail_k, data.new_k), (data.tail_v, data.new_v)]


def jitted(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """LLVM's optimisations change nothing that is looked at here, and take a third of the time."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(functools.partial(function, **static), compiler_options=options)


def close(got: Any, want: np.ndarray, tolerance: float) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit."""
    leaves = [jax.tree.leaves(x) for x in (a, b)]
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(*leaves, strict=True))
