"""Page scores, every implementation against a loop in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

from .plain import EVERY, LAYER, Case, Data, close, draw, jitted, keys_of, same, softmax

CASES = [
    (Case(5, 3, 2, 4, 64, 4, 9), (3, 1, 0, 2, 3), (0, 1, 9, 36, 30), False),
    (Case(3, 2, 3, 3, 20, 5, 30, "bfloat16"), (2, 1, 2), (150, 64, 129), True),
    (Case(2, 1, 1, 8, 128, 16, 2, "float16"), (1, 1), (32, 17), False),
]


def ends_of(data: Data) -> np.ndarray:
    """Each row's first and last query [B, 2, Hkv, G, D]; an idle row's are anything."""
    last = data.first + np.maximum(data.queries - 1, 0)
    return data.q[np.stack([data.first, last], axis=1)]


def expected(data: Data, ends: np.ndarray, extra: float) -> tuple[np.ndarray, np.ndarray]:
    """Token weights [B, 2, Hkv, G, n, page_size] and log-sum-exps, where a key outside the list scores `extra`."""
    c = data.case
    weights = np.zeros((c.b, 2, c.h, c.g, c.pages, c.size))
    lse = np.full((c.b, 2, c.h, c.g), 7.0)
    for row in np.flatnonzero(data.queries):
        keys, _ = keys_of(data, row)
        places = [(e, o) for e in range(data.used[row]) for o in range(data.counts[row, e])]
        for i in range(2):
            for head in range(c.h if places else 0):
                inside, found = softmax(ends[row, i, head], keys[head])
                lse[row, i, head] = np.logaddexp(found, extra)
                for n, (entry, offset) in enumerate(places):
                    weights[row, i, head, :, entry, offset] = inside[..., n] * np.exp(found - lse[row, i, head])
    return weights, lse


@EVERY
@pytest.mark.parametrize(
    ("heads", "index"), [("max", 0), ("max", 1), ("max", 2), ("mean", 0), ("mean", 1), ("kv", 0), ("kv", 1)]
)
def test_page_scores(heads: Any, index: int, implementation: str) -> None:
    case, queries, lengths, holes = CASES[index]
    data = draw(case, queries, lengths, holes=holes)
    ends = ends_of(data)
    weights, lse = expected(data, ends, extra=0.5)
    over = {"max": lambda w: w.max((2, 3)), "mean": lambda w: w.mean((2, 3)), "kv": lambda w: w.mean(3)}[heads]
    want = over(weights).sum(-1).mean(1)
    call = jitted(pk.page_scores, heads=heads, implementation=implementation)
    args = (data.low(ends), jnp.asarray(lse, jnp.float32), data.low(data.k), jnp.int32(LAYER), data.lists)
    got = call(*args)
    close(got, want, 1e-4)  # a weight is the exponential of a score whose rounding error grows with its size
    assert not np.asarray(got)[want == 0].any()
    assert same(call(*args), got)
