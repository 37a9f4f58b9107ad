"""Several refresh layers, and the blend of a layer's own scores with a refresh layer's: which pages, by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax.context import BlendContext, RefreshContext, Room, Scores

from . import tiny
from .test_context import chosen

CONFIG = tiny.config(layers=4, heads=2, kv=2)
ROOM = Room(10, 4, 8, 2)
LENGTH = jnp.asarray([40], jnp.int32)


def mass_of(**best: int) -> jax.Array:
    """Scores [1, 10] of the pages named p3=9."""
    mass = np.zeros((1, 10), np.float32)
    for page, score in best.items():
        mass[0, int(page[1:])] = score
    return jnp.asarray(mass)


def scores(layers: tuple[int, ...], *mass: jax.Array) -> Scores:
    return Scores(layers, jnp.stack(mass), jnp.ones((len(layers), 1), bool), LENGTH)


def sets(policy: Any, state: Any, config: Any = CONFIG) -> list[list[int]]:
    """What each layer of the first row may read."""
    selection = policy.select(state, LENGTH, ROOM)
    return [chosen(selection[i])[0] for i in policy.plan(config).sets]


def test_refresh_layers_serve_the_layers_behind_them() -> None:
    policy = RefreshContext(k_min=2, recent=1, rho=0.0, layers=(1, 2), renew="step")
    plan = policy.plan(CONFIG)
    assert (plan.refresh_layers, plan.verify_layers) == ((1, 2), (1, 2))
    assert (plan.sets, plan.same_step) == ((1, 0, 1, 1), True)
    state = policy.init(CONFIG, 1, ROOM)
    state = policy.observe(state, scores((1, 2), mass_of(p3=1), mass_of(p5=1)))
    assert sets(policy, state) == [[5, 9], [3, 9], [5, 9], [5, 9]]
    # While drafting the layers report one by one, and each takes effect at once.
    state = policy.observe(state, scores((1,), mass_of(p4=1)))
    assert sets(policy, state) == [[5, 9], [4, 9], [5, 9], [5, 9]]
    state = policy.observe(state, scores((2,), mass_of(p6=1)))
    assert sets(policy, state) == [[6, 9], [4, 9], [6, 9], [6, 9]]


def test_one_refresh_layer_stays_aspires() -> None:
    plan = RefreshContext(renew="step").plan(CONFIG)
    assert (plan.sets, plan.same_step, plan.refresh_layers) == ((0, 0, 0, 0), False, (2,))
    assert RefreshContext(renew="verification", layers=(0, 3)).plan(CONFIG).same_step is False


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1,), (4,)])
@pytest.mark.parametrize("policy", [RefreshContext, BlendContext])
def test_refresh_layers_the_model_lacks_or_out_of_order_are_refused(policy: Any, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layers: "):
        policy(layers=layers).plan(CONFIG)


# Ten pages of 4 tokens. A budget of 24 tokens is 6 pages; page 0 is the sink, 8 and 9 are the window: 3 are free.
FIELDS: dict[str, Any] = {"rho": 0.0, "least": 24, "window": 0.25, "sinks": 4, "layers": (2,)}
OWN = [mass_of(p1=9, p2=8, p3=7), mass_of(p2=9, p4=8, p6=7), mass_of(p7=9, p1=8, p5=7), mass_of(p3=9, p7=8, p6=7)]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (1.0, [[1, 2, 3], [2, 4, 6], [1, 5, 7], [3, 6, 7]]),
        (0.0, [[1, 5, 7]] * 4),
        # Two pages by the layer's own scores, then layer 2's best that is not in yet.
        (0.67, [[1, 2, 7], [2, 4, 7], [1, 5, 7], [1, 3, 7]]),
        (0.33, [[1, 5, 7], [1, 2, 7], [1, 5, 7], [1, 3, 7]]),
    ],
)
def test_blend_of_own_and_refresh_scores(own: float, expected: list[list[int]]) -> None:
    policy = BlendContext(own=own, **FIELDS)
    state = policy.observe(policy.init(CONFIG, 1, ROOM), scores((0, 1, 2, 3), *OWN))
    assert sets(policy, state) == [sorted([0, *pages, 8, 9]) for pages in expected]


def test_a_refresh_while_drafting_changes_its_share_only() -> None:
    policy = BlendContext(own=0.67, **FIELDS)
    state = policy.observe(policy.init(CONFIG, 1, ROOM), scores((0, 1, 2, 3), *OWN))
    state = policy.observe(state, scores((2,), mass_of(p5=1)))
    assert sets(policy, state)[0] == [0, 1, 2, 5, 8, 9]
    assert sets(policy, state)[3] == [0, 3, 5, 7, 8, 9]


def test_blend_with_several_refresh_layers() -> None:
    policy = BlendContext(own=0.0, **FIELDS | {"layers": (1, 2)})
    state = policy.observe(policy.init(CONFIG, 1, ROOM), scores((1, 2), OWN[1], OWN[2]))
    assert policy.plan(CONFIG).verify_layers == (1, 2)
    assert sets(policy, state) == [[0, 1, 5, 7, 8, 9], [0, 2, 4, 6, 8, 9], [0, 1, 5, 7, 8, 9], [0, 1, 5, 7, 8, 9]]


def test_blend_reads_a_short_context_whole_and_forgets() -> None:
    policy = BlendContext(own=0.5, **FIELDS)
    state = policy.observe(policy.init(CONFIG, 1, ROOM), scores((0, 1, 2, 3), *OWN))
    for length, pages in ((1, [0]), (9, [0, 1, 2]), (24, [0, 1, 2, 3, 4, 5])):
        got = policy.select(state, jnp.asarray([length], jnp.int32), ROOM)
        assert [chosen(layer) for layer in got] == [[pages]] * 4
    assert not np.asarray(policy.forget(state, jnp.array([True])).mass).any()


def test_blend_always_reads_what_the_last_verification_committed() -> None:
    """d_max 9: up to ten tokens are new, on four pages of 4 tokens at most; the window's share asks for less."""
    policy = BlendContext(own=1.0, **FIELDS | {"window": 0.0})
    room = ROOM._replace(d_max=9)
    state = policy.observe(policy.init(CONFIG, 1, room), scores((0, 1, 2, 3), *OWN))
    assert [chosen(layer)[0] for layer in policy.select(state, LENGTH, room)][1] == [0, 2, 6, 7, 8, 9]


def test_blend_of_each_kv_head() -> None:
    policy = BlendContext(own=1.0, heads="kv", **FIELDS)
    plan = policy.plan(CONFIG)
    assert plan.per_head
    both = [jnp.stack([a, b], axis=1) for a, b in zip(OWN, OWN[::-1], strict=True)]  # [1, Hkv, 10]
    state = policy.observe(policy.init(CONFIG, 1, ROOM), scores((0, 1, 2, 3), *both))
    got = policy.select(state, LENGTH, ROOM)
    assert got.shape == (4, 1, 2, 6)
    assert chosen(got[0, 0]) == [[0, 1, 2, 3, 8, 9], [0, 3, 6, 7, 8, 9]]
    assert chosen(got[3, 0]) == [[0, 3, 6, 7, 8, 9], [0, 1, 2, 3, 8, 9]]
    gone = policy.forget(state, jnp.array([True]))
    assert not np.asarray(gone.mass).any()


def test_blend_plan() -> None:
    plan = BlendContext().plan(tiny.config(layers=30))
    assert (plan.refresh_layers, plan.same_step, plan.renew) == ((15,), True, "step")
    assert plan.verify_layers == plan.sets == tuple(range(30))
    spared = BlendContext(renew="verification", own=0.0).plan(tiny.config(layers=30))
    assert (spared.refresh_layers, spared.verify_layers, spared.same_step) == ((), (15,), False)


def test_which_layers_read_the_copy() -> None:
    """A refresh layer reads everything, and the layers behind one that serves them read the step's own selection."""
    config = tiny.config(layers=5)

    def readers(policy: Any) -> list[int]:
        return [i for i in range(5) if policy.plan(config).reads_copy(i)]

    assert readers(BlendContext(layers=(2,))) == [0, 1]
    assert readers(BlendContext(layers=(2,), renew="verification")) == [0, 1, 2, 3, 4]
    assert readers(RefreshContext(layers=(2,))) == [0, 1, 3, 4]
    assert readers(RefreshContext(layers=(1, 3))) == [0]


def test_rho_widens_the_budget_with_the_context() -> None:
    """ceil(0.5 * 36) = 18 tokens are 5 pages, ceil(0.5 * 40) = 20 are 5 too; at least 16 tokens are 4."""
    policy = BlendContext(rho=0.5, least=16, sinks=4, layers=(2,))
    state = policy.init(CONFIG, 4, ROOM)
    got = jax.jit(policy.select, static_argnums=2)(state, jnp.asarray([20, 33, 36, 40], jnp.int32), ROOM)
    assert (np.asarray(got[0]) >= 0).sum(axis=1).tolist() == [4, 5, 5, 5]
    assert policy.capacity(ROOM) == 5


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"own": 1.1}, "own: 1.1"),
        ({"window": -0.1}, "window: -0.1"),
        ({"rho": float("nan")}, "rho: nan"),
        ({"least": 0}, "least: 0"),
        ({"least": 8, "sinks": 9}, r"sinks: 9, expected 0 to least \(8\)"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        BlendContext(**fields)
