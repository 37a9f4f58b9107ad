"""The loop and admission: when it ends, what it refuses, what it leaves alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng
from aspire_jax import methods, prefill, resolve
from aspire_jax.draft_length import AspireDraftLength

from . import tiny
from .tiny import Request

C = next(iter(tiny.MODELS.values()))
ENGINE = tiny.make(C)
PROMPTS = tiny.prompts((5, 9, 3, 12))


def admitted(news: tuple[int, ...] = (4, 8, 12, 16)) -> eng.State:
    state = tiny.start(ENGINE)
    for slot, (p, n) in enumerate(zip(PROMPTS, news, strict=False)):
        state = tiny.put(ENGINE, tiny.params_of(ENGINE), state, slot, Request(p, n))
    return state


def go(state: eng.State, steps: int, until_finished: int) -> eng.State:
    return tiny.run(ENGINE, tiny.params_of(ENGINE), state, jnp.int32(steps), jnp.int32(until_finished))


@pytest.mark.parametrize(("until_finished", "steps"), [(0, 4), (1, 8), (2, 12), (3, 16), (4, 16)])
def test_run_ends_once_more_rows_than_wanted_have_finished(until_finished: int, steps: int) -> None:
    assert np.asarray(go(admitted(), 100, until_finished).slots.steps).max() == steps


def test_run_ends_after_max_steps_and_goes_on_from_there() -> None:
    state = go(admitted(), 0, 4)
    assert not np.asarray(state.slots.steps).any()
    state = go(go(state, 5, 4), 100, 4)
    whole = go(admitted(), 100, 4)
    assert np.array_equal(state.slots.out, whole.slots.out)
    assert np.asarray(state.slots.steps).tolist() == [4, 8, 12, 16]
    assert not np.asarray(go(state, 100, 4).slots.active).any()


def test_work_and_shapes_are_counted() -> None:
    state = go(admitted(), 100, 4)
    assert np.asarray(state.shape_steps).sum() == 16 == float(state.work[0])
    widths = [s.tokens for s in ENGINE.shapes.all]
    assert float(state.work[1]) == float(np.dot(widths, np.asarray(state.shape_steps)))


@pytest.mark.parametrize("size", [1, 3, 8, 64])
def test_prefill_does_not_depend_on_the_chunks(size: int) -> None:
    """Keys and values of the whole prompt at their places, and nothing else written."""
    prompt = np.asarray(tiny.prompts([23])[0], np.int32)
    write = jax.jit(prefill.prefill, static_argnums=0)
    caches = []
    for chunk in (size, 23):
        state = tiny.start(ENGINE)
        for tokens, start, count in prefill.chunks(prompt, chunk):
            args = (jnp.int32(2), jnp.asarray(tokens), jnp.int32(start), jnp.int32(count))
            state = write(ENGINE, tiny.params_of(ENGINE), state, *args)
        caches.append([np.asarray(x).reshape(1, 4, 64, 16) for x in (*state.cache.k, *state.cache.v)])
    for got, want in zip(*caches, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
        assert got[:, 2, :23].any(axis=-1).all()
        assert not got[:, 2, 23:].any()
        assert not got[:, [0, 1, 3]].any()


def test_chunks() -> None:
    parts = prefill.chunks(np.arange(7), 3)
    assert [(p.tolist(), start, count) for p, start, count in parts] == [
        ([0, 1, 2], 0, 3),
        ([3, 4, 5], 3, 3),
        ([6, 0, 0], 6, 1),
    ]
    assert prefill.chunks(np.arange(0), 3) == []


def test_a_row_that_reaches_the_end_of_its_slot_ends_with_length() -> None:
    """Asked for more tokens than its pages hold, a request must stop there and not overwrite what it holds."""
    prompt = tiny.prompts([60])[0]
    truth = tiny.greedy(C, [prompt], 24)
    answers, _ = tiny.serve(ENGINE, [Request(prompt, 24)])
    assert len(answers[0].tokens) <= 5  # 64 places, 59 of them taken by the prompt but for its last token
    assert answers[0].reason == eng.LENGTH
    tiny.assert_same(answers, truth)


@pytest.mark.parametrize(("in_step", "tokens"), [(True, [2, 2, 0, 0]), (False, [0, 3, 1, 2])])
def test_accept_greedy(in_step: bool, tokens: list[int]) -> None:
    """The longest prefix of the drafts that count equal to the target's."""
    drafts = jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]], jnp.int32)
    if in_step:
        drafted, target = [2, 2, 2, 0], [[1, 2, 3, 4], [4, 5, 9, 9], [8, 8, 9, 0], [1, 1, 1, 1]]
    else:
        drafted, target = [3, 3, 3, 2], [[0, 2, 3, 4], [4, 5, 6, 0], [7, 0, 9, 0], [1, 1, 1, 1]]
    got = resolve.accept_greedy(drafts, jnp.asarray(drafted), jnp.asarray(target, jnp.int32))
    assert np.asarray(got).tolist() == tokens


def test_capacity_is_whole_pages() -> None:
    with pytest.raises(ValueError, match="capacity: 63, expected whole pages of 4 tokens"):
        dataclasses.replace(ENGINE, capacity=63)
    with pytest.raises(ValueError, match="capacity: 0"):
        dataclasses.replace(ENGINE, capacity=0)


def test_configure_rounds_up_and_splits_options() -> None:
    options = {"rho": 0.2, "d_max": 5, "gamma_init": 2}
    engine = methods.configure(C, "aspire", batch=2, capacity=33, max_new=8, options=options)
    assert (engine.capacity, engine.context.rho, engine.d_max) == (48, 0.2, 5)
    assert engine.draft_length.in_step is not engine.mixed
    assert engine.plan.renew == ("step" if engine.mixed else "verification")
    assert hash(engine) == hash(dataclasses.replace(engine))


@pytest.mark.parametrize("mixed", [True, False])
def test_configured_engines_keep_rows_in_step_unless_they_mix(mixed: bool) -> None:
    engine = methods.configure(C, "aspire", batch=2, capacity=64, max_new=8, options={"mixed": mixed})
    assert engine.mixed is mixed
    assert isinstance(engine.draft_length, AspireDraftLength)
    assert engine.draft_length.in_step is not mixed


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("medusa", {}, "method: 'medusa', expected one of autoregressive, "),
        ("aspire", {"beam": 3}, "option 'beam': method 'aspire' has no such option"),
        ("autoregressive", {"rho": 0.1}, "option 'rho': method 'autoregressive' has no such option"),
        ("aspire", {"rho": 7}, "rho: 7, expected a share"),
    ],
)
def test_configure_refuses_by_name(method: str, options: dict[str, float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        methods.configure(C, method, batch=2, capacity=64, max_new=8, options=options)


def test_bfloat16() -> None:
    """Runs under strict promotion, and its first tokens are those of dense bfloat16 attention."""
    c = tiny.config(layers=1)
    engine = tiny.aspire(c, in_step=False, renew="step", d_max=1, dtype="bfloat16", dense=False)
    answers, state = tiny.serve(engine, [Request(p, 8) for p in PROMPTS])
    assert state.cache.k[0].dtype == jnp.bfloat16
    firsts = tiny.greedy(c, PROMPTS, 1, dtype="bfloat16")
    for a, want in zip(answers, firsts, strict=True):
        assert len(a.tokens) == 8
        assert a.tokens[0] == want.tokens[0] or want.margins[0] < 0.1


def test_an_option_given_alone_takes_its_companion_down() -> None:
    c = next(iter(tiny.MODELS.values()))
    e = methods.configure(c, "aspire", batch=1, capacity=64, max_new=8, options={"d_max": 2, "k_min": 4})
    assert (e.draft_length.gamma_init, e.context.recent) == (2, 4)
