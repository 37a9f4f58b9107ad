"""Top-k, top-p and min-p against sorts, equal logits included; what the margin of a sampled token promises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax.sampling import draw
from aspire_jax.sampling.rows import Settings, Support
from aspire_jax.sampling.truncate import threshold, truncated

from . import sampling_reference as reference
from . import tiny

SUPPORT = Support()
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 60},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
]
T, V = len(FILTERS), tiny.VOCAB


def settings(**more: float) -> Settings:
    rows = [tiny.settings(SUPPORT, i, **({"temperature": 1.0} | f | more)) for i, f in enumerate(FILTERS)]
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)


def row_of(s: Settings, i: int) -> Settings:
    return jax.tree.map(lambda x: x[i], s)


def logits(kind: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = 3 * rng.standard_normal((T, V)).astype(np.float32)
    if kind == "equal ones":  # few values, many tokens each
        x = np.round(x)
    if kind == "all equal":
        x[:] = 0
    if kind == "ruled out":
        x[:, ::2] = -np.inf
    if kind == "steep":
        x = x * 30
    return x


_truncated = jax.jit(truncated)


@pytest.mark.parametrize("kind", ["plain", "equal ones", "all equal", "ruled out", "steep"])
def test_filters_keep_what_a_sort_keeps(kind: str) -> None:
    s = settings()
    for seed in range(20):
        x = logits(kind, seed)
        got = np.asarray(_truncated(s, jnp.asarray(x), jnp.arange(T)).logits)
        for i, f in enumerate(FILTERS):
            stay = reference.kept(row_of(s, i), x[i].astype(np.float64))
            assert np.array_equal(got[i] > -np.inf, stay), (f, kind, seed)
            assert np.array_equal(got[i][stay], x[i][stay])


def test_greedy_rows_are_not_truncated() -> None:
    s = settings().replace(temperature=jnp.zeros(T))
    x = logits("plain")
    assert np.array_equal(_truncated(s, jnp.asarray(x), jnp.arange(T)).logits, x)


def test_threshold_by_hand() -> None:
    values = jnp.asarray([[1, 4, 2, 4, 3, -jnp.inf]] * 6, jnp.float32)
    target = jnp.asarray([1, 2, 3, 5, 6, 2], jnp.float32)
    use = jnp.asarray([1, 1, 1, 1, 1, 0], bool)
    lowest, below = threshold(values, jnp.ones_like(values), target, use)
    # The second 4 comes with the first; six are not there; the last row does not ask.
    assert np.asarray(lowest).tolist() == [4, 4, 3, 1, -np.inf, -np.inf]
    assert np.asarray(below).tolist() == [3, 3, 2, -np.inf, -np.inf, -np.inf]


# One compilation for all that follows: as many packed tokens as filters, each in a row of its own.
@jax.jit
def _draw(s: Settings, x: jax.Array) -> draw.Drawn:
    sampling = draw.Sampling(s, *(jnp.zeros((T, 0, *more)) for more in ((0,), (), (0,), (0,))))
    row = jnp.arange(T, dtype=jnp.int32)
    nothing = jnp.zeros((T,), jnp.int32)
    rows = draw.Rows(nothing > 0, jnp.zeros((T, 1), jnp.int32), nothing, nothing + 7, nothing, nothing[:, None] - 1)
    packed = draw.Packed(x, row, nothing, nothing == 0)
    return draw.draw(SUPPORT, sampling, packed, rows, jnp.int32(1), nothing, jnp.zeros((T,)))[1]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_a_change_within_the_margin_changes_no_token(temperature: float) -> None:
    """The promise behind a near tie: logits that differ by less than half the margin give the same token."""
    s = settings(temperature=temperature)
    rng = np.random.default_rng(1)
    for seed in range(15):
        x = logits("plain", seed)
        before = _draw(s, jnp.asarray(x))
        token, margin = np.asarray(before.token), np.asarray(before.margin)
        assert (margin >= 0).all() and np.isfinite(margin[0])
        for _ in range(15):
            change = np.where(rng.random((T, V)) < 0.5, -1, 1) * np.minimum(margin, 1)[:, None] * 0.49
            after = _draw(s, jnp.asarray((x + change).astype(np.float32)))
            assert np.array_equal(after.token, token), (seed, FILTERS)


def test_margins_by_hand() -> None:
    """Without noise to speak of (temperature 100 times the logits' spread), borders are what is near."""
    s = settings()
    x = np.tile(np.linspace(-8, 4, V, dtype=np.float32), (T, 1))
    drawn = _draw(s, jnp.asarray(x))
    step = x[0, 1] - x[0, 0]
    # Top-1: the second best lies one step below, and enters by changing places with the best.
    assert int(drawn.token[1]) == V - 1
    np.testing.assert_allclose(drawn.margin[1], step, rtol=1e-4)
    # min_p 1 keeps the best alone, and any change of order exchanges it.
    assert int(drawn.token[8]) == V - 1
    np.testing.assert_allclose(drawn.margin[8], 0, atol=1e-6)
