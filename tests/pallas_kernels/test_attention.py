"""Mixed attention, every implementation against a loop in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

from .plain import EVERY, LAYER, ROUNDING, Case, Data, attention, close, draw, jitted, same

# Lengths are 0, 1, page edges and full; query counts 0, 1 and the most. Dtypes, groups and head_dims take turns.
CASES = [
    (Case(6, 3, 2, 4, 64, 4, 8), (3, 1, 0, 2, 3, 3), (0, 1, 9, 4, 32, 31)),
    (Case(4, 5, 1, 3, 96, 16, 3, "bfloat16"), (5, 5, 1, 4), (48, 16, 17, 0)),
    (Case(3, 17, 1, 8, 128, 8, 4, "float16"), (17, 0, 9), (32, 8, 15)),
    (Case(2, 1, 2, 1, 256, 16, 2, "bfloat16"), (1, 1), (32, 15)),
    (Case(2, 3, 1, 2, 64, 16, 40), (3, 2), (640, 257)),  # three splits, the second row ends just in its second
    (Case(2, 40, 1, 5, 20, 5, 9, tile_rows=16), (40, 33), (45, 7)),  # many tiles, nothing a power of two
]
IDS = [str(c[0]) for c in CASES]


def run(data: Data, implementation: str, *, drafts: bool = False, **other: Any) -> Any:
    most = 1 if drafts else data.case.q
    call = jitted(
        pk.mixed_attention, max_queries=most, implementation=implementation, tile_rows=data.case.tile_rows, **other
    )
    near = data.tails if drafts else data.new
    return call(*(data.low(x) for x in (data.q, data.k, data.v)), jnp.int32(LAYER), data.lists, data.rows, near)


def check(data: Data, implementation: str, drafts: bool) -> None:
    out, lse, owned = attention(data, drafts)
    got = run(data, implementation, drafts=drafts)
    assert got[0].dtype == got[1].dtype == jnp.float32
    rounding = ROUNDING["float32" if implementation == "xla" else data.case.dtype]
    close(np.asarray(got[0])[owned], out[owned], rounding)
    close(np.asarray(got[1])[owned], lse[owned], ROUNDING["float32"])
    if implementation == "interpret":
        # The interpreter's outputs start as NaN, and no token of nobody's was touched.
        assert np.isnan(np.asarray(got[0])[~owned]).all()
        assert np.isnan(np.asarray(got[1])[~owned]).all()
    assert same(run(data, implementation, drafts=drafts), got)


@EVERY
@pytest.mark.parametrize(("case", "queries", "lengths"), CASES, ids=IDS)
def test_whole_tables(case: Case, queries: Any, lengths: Any, implementation: str) -> None:
    check(draw(case, queries, lengths), implementation, drafts=False)


@EVERY
@pytest.mark.parametrize("index", [0, 1, 4])
def test_drafts_over_lists_with_holes(index: int, implementation: str) -> None:
    """One query a row, over pages in no order with holes and pages of others among them, and a tail of its own.

    In one case each KV head has a list of its own.
    """
    case, queries, lengths = CASES[index]
    data = draw(case, np.minimum(queries, 1), lengths, holes=True, heads=index == 0)
    assert (data.counts[data.queries > 0] == 0).any()
    check(data, implementation, drafts=True)


@EVERY
def test_verifying_rows_may_read_lists_with_holes(implementation: str) -> None:
    case, queries, lengths = CASES[0]
    check(draw(case, queries, lengths, holes=True, seed=3), implementation, drafts=False)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Row 0 gives the same bits whatever the others do, and wherever it lies among the packed tokens."""
    case = CASES[4][0]
    data = draw(case, (3, 2), (640, 257))
    alone = data._replace(queries=np.array([3, 0], np.int32), used=data.used * np.array([1, 0], np.int32))
    mine = slice(data.first[0], data.first[0] + 3)
    one, two = (np.asarray(run(d, "interpret")[0])[mine] for d in (data, alone))
    assert np.array_equal(one, two)
    moved = data._replace(
        first=np.array([0, data.q.shape[0] - 2], np.int32),
        **{name: np.roll(getattr(data, name), -data.first[0], axis=0) for name in ("q", "new_k", "new_v")},
    )
    far = data.first[1] - data.first[0]
    moved = moved._replace(first=np.array([0, far % data.q.shape[0]], np.int32))
    assert np.array_equal(np.asarray(run(moved, "interpret")[0])[:3], one)


def test_a_token_gets_the_same_bits_in_a_step_of_one_query() -> None:
    """With equal tiles the first query of a verification is the one query of a plain step, bit for bit."""
    case = Case(2, 3, 1, 2, 64, 16, 40, tile_rows=16)
    data = draw(case, (3, 2), (640, 257))
    single = data._replace(case=Case(2, 1, 1, 2, 64, 16, 40, tile_rows=16), queries=np.array([1, 1], np.int32))
    a, b = (np.asarray(run(d, "interpret")[0])[data.first] for d in (data, single))
    assert np.array_equal(a, b)


def test_drafting_rows_have_one_query() -> None:
    case, queries, lengths = CASES[0]
    data = draw(case, queries, lengths)
    args = [data.low(x) for x in (data.q, data.k, data.v)]
    with pytest.raises(ValueError, match="max_queries: 3, expected 1 where rows draft"):
        pk.mixed_attention(*args, jnp.int32(0), data.lists, data.rows, data.tails, max_queries=3, implementation="xla")
