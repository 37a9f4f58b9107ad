"""Which pages the baselines' drafts may read, worked by hand from their papers' rules."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax.context import Room, Scores, StreamingContext, VegasContext

from . import tiny
from .test_context import chosen

CONFIG = tiny.config(layers=2)


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def streamed(lengths: list[int], room: Room, **fields: int) -> list[list[int]]:
    policy = StreamingContext(**fields)
    got = policy.select(policy.init(CONFIG, len(lengths), room), ints(*lengths), room)
    assert got.shape == (1, len(lengths), policy.capacity(room))
    return chosen(got[0])


def test_streaming_reads_sinks_and_window() -> None:
    """Budget 16 tokens of which 4 are sinks: with pages of 4 the first page and the last three."""
    room = Room(10, 4, 8, 2)
    assert streamed([40, 37, 36, 17], room, budget=16, sinks=4) == [
        [0, 7, 8, 9],
        [0, 7, 8, 9],
        [0, 6, 7, 8],
        [0, 2, 3, 4],
    ]


def test_streaming_window_slides_by_a_page_when_a_page_begins() -> None:
    room = Room(10, 4, 8, 2)
    slid = streamed(list(range(29, 38)), room, budget=12, sinks=4)
    assert slid == [[0, 6, 7]] * 4 + [[0, 7, 8]] * 4 + [[0, 8, 9]]


def test_streaming_reads_a_short_context_whole() -> None:
    room = Room(10, 4, 8, 2)
    assert streamed([0, 1, 4, 5, 16], room, budget=16, sinks=4) == [[], [0], [0], [0, 1], [0, 1, 2, 3]]


def test_streaming_by_single_tokens() -> None:
    room = Room(20, 1, 8, 2)
    assert streamed([20, 9], room, budget=6, sinks=2) == [[0, 1, 16, 17, 18, 19], [0, 1, 5, 6, 7, 8]]


def test_streaming_without_sinks_and_with_pages_larger_than_its_budget() -> None:
    assert streamed([40], Room(10, 4, 8, 2), budget=8, sinks=0) == [[8, 9]]
    assert streamed([90], Room(10, 16, 8, 2), budget=16, sinks=4) == [[0, 5]]


def test_streaming_measures_nothing() -> None:
    plan = StreamingContext().plan(CONFIG)
    assert (plan.verify_layers, plan.refresh_layers, plan.n_sets, plan.renew) == ((), (), 1, "verification")


ROOM = Room(10, 4, 8, 3)


def verified(
    policy: VegasContext, mass: Any, scored: list[int], rows: list[bool] | None = None, state: Any = None
) -> Any:
    """The state after a verification of `rows`, whose pages hold `scored` tokens and `mass` [2, B, 10]."""
    state = policy.init(CONFIG, len(scored), ROOM) if state is None else state
    measured = jnp.asarray([rows or [True] * len(scored)] * 2)
    return policy.observe(state, Scores((0, 1), jnp.asarray(mass, jnp.float32), measured, ints(*scored)))


MASS = np.array([[[0.1, 0.5, 0.0, 0.9, 0.2, 0.3, 0, 0, 0, 0]], [[0.6, 0.0, 0.8, 0.1, 0.1, 0.7, 0, 0, 0, 0]]])


def test_vegas_takes_each_layers_best_tokens() -> None:
    """24 tokens scored and none since: the best 8 tokens are two pages, no sink and no window among them."""
    policy = VegasContext(rho=0.0, least=8)
    state = verified(policy, MASS, [24])
    got = policy.select(state, ints(24), ROOM)
    assert got.shape == (2, 1, policy.capacity(ROOM))
    assert [chosen(layer) for layer in got] == [[[1, 3]], [[2, 5]]]


def test_vegas_reads_everything_behind_the_verified_position() -> None:
    """22 tokens were scored, 26 are committed: tokens 22 to 25 lie on pages 5 and 6, beside the best two."""
    policy = VegasContext(rho=0.0, least=8)
    state = verified(policy, MASS, [22])
    assert [chosen(layer) for layer in policy.select(state, ints(26), ROOM)] == [[[1, 3, 5, 6]], [[0, 2, 5, 6]]]


def test_vegas_budget() -> None:
    """ceil(rho * T) tokens but at least `least`, in whole pages, beside those committed since."""
    policy = VegasContext(rho=0.5, least=6)
    state = verified(policy, MASS, [24])
    counts = [(np.asarray(policy.select(state, ints(n), ROOM)[0]) >= 0).sum() for n in (24, 25, 28)]
    # 12 tokens are 3 pages; 13 are 4, with the page of token 24; 14 are 4, with that page.
    assert counts == [3, 5, 5]
    short = verified(policy, MASS[:, :, :], [8])
    assert [chosen(layer) for layer in policy.select(short, ints(8), ROOM)] == [[[0, 1]], [[0, 1]]]


def test_vegas_before_anything_was_scored_reads_the_first_pages_up_to_its_capacity() -> None:
    policy = VegasContext(rho=0.0, least=8)
    state = policy.init(CONFIG, 1, ROOM)
    assert chosen(policy.select(state, ints(9), ROOM)[0]) == [[0, 1, 2]]


def test_vegas_by_single_tokens() -> None:
    policy, room = VegasContext(rho=0.25, least=2), Room(12, 1, 8, 3)
    mass = np.zeros((2, 1, 12))
    mass[:, 0, :10] = [[0, 1, 5, 0, 3, 0, 0, 4, 0, 2], [9, 0, 0, 8, 0, 0, 7, 0, 0, 6]]
    state = policy.init(CONFIG, 1, room)
    state = policy.observe(state, Scores((0, 1), jnp.asarray(mass, jnp.float32), jnp.ones((2, 1), bool), ints(10)))
    # ceil(11 / 4) = 3 tokens, and token 10, which was committed since.
    assert [chosen(layer) for layer in policy.select(state, ints(11), room)] == [[[2, 4, 7, 10]], [[0, 3, 6, 10]]]


def test_vegas_remembers_rows_that_were_not_measured_and_forgets_those_taken_over() -> None:
    policy = VegasContext(rho=0.0, least=4)
    two = np.repeat(MASS, 2, axis=1)
    state = verified(policy, two, [24, 24])
    state = verified(policy, two[:, :, ::-1], [28, 28], [False, True], state)
    assert np.asarray(state.scored).tolist() == [24, 28]
    assert [chosen(layer) for layer in policy.select(state, ints(24, 28), ROOM)] == [[[3], [6]], [[2], [4]]]
    state = policy.forget(state, jnp.array([True, False]))
    assert np.asarray(state.scored).tolist() == [0, 28]
    assert not np.asarray(state.mass[:, 0]).any()
    assert np.asarray(state.mass[:, 1]).any()


@pytest.mark.parametrize("size", [1, 3, 4, 16])
@pytest.mark.parametrize("d_max", [1, 4, 16])
def test_vegas_capacity_holds_every_selection(size: int, d_max: int) -> None:
    """Whatever the lengths: the budget and all pages that a verification may have added are in."""
    room, policy = Room(120, size, 8, d_max), VegasContext(rho=0.1, least=5)
    for scored in range(0, 100, 7):
        state = policy.init(CONFIG, 1, room).replace(scored=ints(scored))
        for added in {1, 2, d_max, d_max + 1}:
            length = min(scored + added, 120 * size)
            got = chosen(policy.select(state, ints(length), room)[0])[0]
            assert set(range(scored // size, -(-length // size))) <= set(got)
            best = -(-max(5, math.ceil(np.float32(0.1) * np.float32(length))) // size)
            assert len(got) >= min(best, -(-length // size))


@pytest.mark.parametrize(
    ("policy", "fields", "expected"),
    [
        (StreamingContext, {"sinks": -1}, "sinks: -1, expected 0 to less than budget"),
        (StreamingContext, {"budget": 16, "sinks": 16}, "sinks: 16"),
        (VegasContext, {"rho": 1.5}, "rho: 1.5"),
        (VegasContext, {"least": 0}, "least: 0"),
    ],
)
def test_values_out_of_range_are_refused(policy: Any, fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        policy(**fields)
