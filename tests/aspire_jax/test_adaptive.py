"""The adaptive draft length: what it expects, what that is worth, and that it neither gives up nor runs up losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import methods
from aspire_jax.draft_length import AdaptiveDraftLength, AdaptiveState, likelihood
from aspire_jax.signals import unknown

from . import tiny
from .policies import CAPACITY, B, decide, outcome, view

# Reading is all that costs: a draft reads 128 + 1024 / 32 tokens where a verification reads 1024.
READ = (0.0, 0.0, 1e-3, 0.0)
# Tokens per second of a batch whose present speed a test sets.
PACE = 1.5
# A step costs the same whatever it does: drafting only delays.
FLAT = (1.0, 0.0, 0.0, 0.0)


def rows(*values: float) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


def seen(policy: AdaptiveDraftLength, accepted: Any, tried: Any, **fields: Any) -> AdaptiveState:
    """A state whose rows have these sums, with nothing else known."""
    state = policy.init(B)
    known = state.likelihood.replace(accepted=rows(*accepted), tried=rows(*tried))
    return state.replace(likelihood=known, **fields)


def test_classes_of_confidence() -> None:
    margin = jnp.asarray([0.0, 0.05, 0.06, 0.5, 2.5, 9.0, np.nan], jnp.float32)
    assert likelihood.class_of(margin).tolist() == [0, 0, 1, 4, 8, 9, 10]


def test_sums_by_hand() -> None:
    """Row 0: 2 of 4 drafts, so 3 were tried; row 1: all 4; row 2 verified without drafts; row 3 did nothing."""
    before = likelihood.unknown(B).replace(
        accepted=rows(10, 10, 10, 10),
        tried=rows(20, 20, 20, 20),
        all_accepted=jnp.float32(40),
        all_tried=jnp.float32(80),
    )
    verified = jnp.array([True, True, True, False])
    kind = jnp.zeros((B, 4), jnp.int32)
    after = likelihood.learned(before, kind, verified, jnp.array([4, 4, 0, 0]), jnp.array([2, 4, 0, 0]), keep=0.5)
    np.testing.assert_allclose(after.accepted, [7, 9, 9.9, 10], rtol=1e-6)
    np.testing.assert_allclose(after.tried, [13, 14, 19.8, 20], rtol=1e-6)
    keep_all = np.mean([1 - 0.5 / 4, 1 - 0.5 / 4, 1 - 0.01 / 4, 1])
    np.testing.assert_allclose(float(after.all_accepted), 40 * keep_all + 6, rtol=1e-6)
    np.testing.assert_allclose(float(after.all_tried), 80 * keep_all + 7, rtol=1e-6)


def test_a_rate_is_filled_up_from_the_batch_and_the_prior() -> None:
    w = likelihood.WEIGHT
    of = likelihood.unknown(B).replace(accepted=rows(0, 9, 0, 0), tried=rows(0, 18, 0, 0))
    np.testing.assert_allclose(likelihood.rate(of, 0.8)[0], 0.8, rtol=1e-6)
    np.testing.assert_allclose(likelihood.rate(of, 0.8)[1], (9 + 0.8 * w) / (18 + w), rtol=1e-6)
    of = of.replace(all_accepted=jnp.float32(10), all_tried=jnp.float32(40))
    batch = (10 + 0.8 * w) / (40 + w)
    np.testing.assert_allclose(likelihood.rate(of, 0.8)[0], batch, rtol=1e-6)


def test_class_and_row_odds_find_what_is_true() -> None:
    """Classes accepted at 30 % and 95 %, and a row whose odds are e times as good."""
    rng = np.random.default_rng(0)
    odds = {1: np.log(0.3 / 0.7), 8: np.log(0.95 / 0.05)}
    of, learn = likelihood.unknown(B), jax.jit(likelihood.learned, static_argnums=5)
    for _ in range(600):
        kind = rng.choice([1, 8], (B, 4))
        p = 1 / (1 + np.exp(-(np.vectorize(odds.get)(kind) + np.array([[1.0], [0], [0], [0]]))))
        accepted = np.cumprod(rng.random((B, 4)) < p, axis=1).sum(axis=1)
        of = learn(of, jnp.asarray(kind, jnp.int32), jnp.ones(B, bool), jnp.full(B, 4), jnp.asarray(accepted), 0.98)
    found = np.asarray(likelihood.held(of, jnp.full((B, 2), jnp.array([1, 8]), jnp.int32)))
    np.testing.assert_allclose(found[1:].mean(axis=0), [0.3, 0.95], atol=0.06)
    assert found[0, 0] > found[1:, 0].mean() + 0.08


def test_forgetting_a_row_leaves_the_others() -> None:
    policy = AdaptiveDraftLength()
    state = seen(policy, (1, 2, 3, 4), (5, 6, 7, 8), made=jnp.array([1, 2, 3, 4]))
    after = policy.forget(state, jnp.array([False, True, False, False]))
    assert after.likelihood.accepted.tolist() == [1, 0, 3, 4]
    assert after.likelihood.tried.tolist() == [5, 0, 7, 8]
    assert after.made.tolist() == [1, 0, 3, 4]


@pytest.mark.parametrize("mixed", [True, False])
def test_drafts_where_reading_is_all_and_never_where_nothing_is_gained(mixed: bool) -> None:
    policy = AdaptiveDraftLength(d_max=4)
    good = seen(policy, [90] * B, [100] * B)
    assert decide(policy, good, view(4, READ, mixed=mixed)) == "DDDD"
    assert decide(policy, good, view(4, FLAT, mixed=mixed)) == "VVVV"
    poor = seen(policy, [0] * B, [1000] * B)
    assert decide(policy, poor, view(4, READ, mixed=mixed)) == "VVVV"


def test_rows_that_mix_go_their_own_ways() -> None:
    policy = AdaptiveDraftLength(d_max=8, confidence=False)
    state = seen(policy, [95, 10, 95, 10], [100] * B)
    assert decide(policy, state, view(8, READ, drafted=[2] * B)) == "DVDV"


def test_rows_that_march_wait_for_each_other() -> None:
    policy = AdaptiveDraftLength(d_max=8)
    state = seen(policy, [95] * B, [100] * B)
    assert decide(policy, state, view(8, READ, mixed=False, limit=[8, 8, 8, 0])) == "DDD-"


def test_a_lone_row_is_not_held_to_the_pace_of_four() -> None:
    """A step costs the same for one row as for four, and so it drafts as they did."""
    policy = AdaptiveDraftLength(d_max=8)
    state, update = seen(policy, [95] * B, [100] * B), jax.jit(policy.update)
    four = outcome(verified=[True] * B, drafts=[3] * B, accepted=[3] * B, emitted=[4] * B, seconds=1.5, plain_seconds=1)
    for _ in range(50):
        state = update(state, four)
    batched = {"dense": True, "mixed": False, "lengths": [CAPACITY] * B}
    prices = (0.25, 0.0, 0.75 / (B * CAPACITY), 0.0)
    assert decide(policy, state, view(8, prices, **batched)) == "DDDD"
    assert decide(policy, state, view(8, prices, active=[True] + [False] * 3, **batched))[0] == "D"


def test_best_length_by_enumeration() -> None:
    """The row drafts while tokens - lambda * time, over all lengths still possible, is best at a longer one."""
    policy = AdaptiveDraftLength(d_max=6, confidence=False)
    step, token, read, pair = prices = (0.02, 0.01, 1e-3, 1e-6)
    lengths, chosen = set(), 128 + 1024 / 32
    for alpha in (0.3, 0.6, 0.8, 0.9, 0.97):
        state = seen(policy, [alpha * 1e6] * B, [1e6] * B, tokens=jnp.float32(PACE / B), seconds=jnp.float32(1.0))

        def value(g: int, alpha: float = alpha) -> float:
            tokens = sum(alpha**j for j in range(g + 1))
            draft = step / B + token + (read + pair) * chosen
            verify = step / B + token * (g + 1) + (read + pair * (g + 1)) * 1024
            return tokens - PACE * (g * draft + verify)

        best = int(np.argmax([value(g) for g in range(7)]))
        for d in range(6):
            got = decide(policy, state, view(6, prices, drafted=[d] * B))
            assert got == ("D" if d < best else "V") * B, (alpha, d, best)
        lengths.add(best)
    assert len(lengths) >= 3


def test_a_doubtful_draft_ends_its_rows_drafting() -> None:
    policy = AdaptiveDraftLength(d_max=8)
    state = seen(policy, [80] * B, [100] * B, made=jnp.ones(B, jnp.int32))
    signals = unknown(B)._replace(margin=rows(5.0, 0.01, 5.0, 0.01))
    made = policy.update(state.replace(made=jnp.zeros(B, jnp.int32)), outcome(drafted=[True] * B, signals=signals))
    assert made.kind[:, 0].tolist() == [9, 0, 9, 0]
    assert decide(policy, made, view(8, READ, drafted=[1] * B, selected=[512.0] * B)) == "DVDV"


def test_comes_back_after_rejections() -> None:
    """Twenty verifications reject everything and drafting stops; plain steps later it is tried again."""
    policy = AdaptiveDraftLength(d_max=4, regret_share=1.0)
    update = jax.jit(policy.update)
    state, plain = policy.init(B), np.float32(B * 1.024)
    for _ in range(20):
        rejected = outcome(verified=[True] * B, drafts=[4] * B, emitted=[1] * B, seconds=plain, plain_seconds=plain)
        state = update(state, rejected)
    assert decide(policy, state, view(4, READ)) == "VVVV"
    for _ in range(600):
        state = update(state, outcome(verified=[True] * B, emitted=[1] * B, seconds=plain, plain_seconds=plain))
    assert decide(policy, state, view(4, READ)) == "DDDD"


@pytest.mark.parametrize("mixed", [True, False])
def test_losses_stay_within_the_allowance(mixed: bool) -> None:
    """Nothing is ever accepted, whatever the drafts' confidence: all but the allowed share of the time is plain."""
    policy = AdaptiveDraftLength(d_max=4, regret_share=0.02, regret_steps=2.0)
    b = np.asarray(READ)
    arrays = view(4, READ, mixed=mixed)
    static, cost = arrays.shapes, tiny.cost(*READ)

    @jax.jit
    def go(state: Any, drafted: jax.Array) -> Any:
        v = arrays._replace(drafted=drafted)
        action = policy.decide(state, v)
        drafting, verified = action == 1, action == 2
        queries = jnp.where(drafting, 1, jnp.where(verified, drafted + 1, 0))
        seconds = cost.seconds(static.forecast(drafting, queries, v.lengths, v.selected))
        plain = cost.seconds(static.forecast(jnp.zeros(B, bool), jnp.ones(B, jnp.int32), v.lengths, v.selected))
        told = outcome(
            verified=verified, drafts=jnp.where(verified, drafted, 0), emitted=verified.astype(jnp.int32),
            drafted=drafting, signals=unknown(B)._replace(margin=jnp.where(drafting, 5.0, jnp.nan)),
            seconds=seconds, plain_seconds=plain,
        )  # fmt: skip
        drafted = jnp.where(drafting, drafted + 1, jnp.where(verified, 0, drafted))
        return policy.update(state, told), drafted, seconds, jnp.sum(verified), plain

    state, drafted = policy.init(B), jnp.zeros(B, jnp.int32)
    spent = emitted = plain = 0.0
    for _ in range(1500):
        state, drafted, seconds, tokens, plain = (x for x in go(state, drafted))
        spent, emitted = spent + float(seconds), emitted + float(tokens)
    should = emitted / B * float(plain)
    # Beyond the allowance at most what was under way when it ran out.
    assert spent <= 1.02 * should + (2 + 4) * float(plain)
    assert b.sum() > 0


@pytest.mark.parametrize("mixed", [True, False])
def test_method(mixed: bool) -> None:
    """Answers are those of plain decoding, over slots that are taken over, and drafts are made and accepted."""
    options = {"d_max": 2, "least": 12, "rho": 0.1, "mixed": mixed, "regret_steps": 1e3}
    engine = methods.configure(
        tiny.config(), "adaptive", batch=4, capacity=64, max_new=24, options=options, page_size=tiny.PAGE
    )
    assert engine.mixed == mixed
    prompts = tiny.prompts((13, 40, 7, 30, 22, 18))
    answers, _ = tiny.serve(engine, [tiny.Request(p) for p in prompts])
    tiny.assert_same(answers, tiny.greedy(engine.config, prompts, 24))
    assert sum(a.accepted for a in answers) > 0


def test_options_are_checked() -> None:
    for field, value in (("d_max", 0), ("d_max", 33), ("alpha_0", 1.0), ("keep", -0.1), ("regret_share", -1)):
        with pytest.raises(ValueError, match=field):
            AdaptiveDraftLength(**{field: value})
