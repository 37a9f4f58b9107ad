"""Draft-length policies worked by hand and against an independent reading of the paper's section 4."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax.draft_length import (
    DRAFT,
    AspireDraftLength,
    AspireState,
    FixedDraftLength,
    NoDraft,
    View,
    expected_tokens,
)
from aspire_jax.draft_length.regret import Ledger
from aspire_jax.shapes import COPY_READS, PACKED_STAIRS

from . import tiny
from .policies import BLOCK, CAPACITY, LAYERS, B, decide, outcome, shapes, view


def known(policy: AspireDraftLength, alpha: Any) -> AspireState:
    """A state in which every row has verified drafts."""
    state = policy.init(B)
    return state.replace(alpha=jnp.broadcast_to(jnp.asarray(alpha, jnp.float32), (B,)), seen=jnp.ones((B,), bool))


def test_no_draft() -> None:
    policy = NoDraft()
    assert policy.d_max == 0
    assert decide(policy, policy.init(B), view(0)) == "VVVV"


def test_fixed_rows_keep_in_step() -> None:
    policy = FixedDraftLength(gamma=3)
    assert policy.d_max == 3
    for drafted, limit, active, want in (
        ([0, 0, 0, 0], [3, 3, 3, 3], [1, 1, 1, 1], "DDDD"),
        ([3, 3, 3, 3], [3, 3, 3, 3], [1, 1, 1, 1], "VVVV"),
        ([1, 1, 1, 0], [3, 1, 3, 0], [1, 1, 1, 1], "D-D-"),  # at its limit, a row waits for the others
        ([0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], "VVVV"),  # nothing was measured yet
        ([1, 3, 0, 3], [3, 3, 3, 3], [0, 1, 0, 1], "VVVV"),  # inactive rows hold nobody up
    ):
        v = view(3, drafted=drafted, limit=limit, active=np.array(active, bool))
        assert decide(policy, (), v) == want


def test_expected_tokens_is_the_sum_of_the_chances() -> None:
    gamma = np.arange(17)
    for alpha in (0.0, 0.1, 0.5, 0.9, 0.99, 0.9998, 0.99995, 1.0):
        want = [sum(alpha**i for i in range(g + 1)) for g in gamma]
        got = jax.jit(expected_tokens)(jnp.full((17,), alpha, jnp.float32), jnp.asarray(gamma, jnp.float32))
        np.testing.assert_allclose(got, want, rtol=1e-3)
        assert np.isfinite(got).all()


@pytest.mark.parametrize("d", [1, 3, 16])
def test_estimator(d: int) -> None:
    """alpha <- w alpha + (1 - w) a / min(a + 1, d) for the rows that verified drafts."""
    policy = AspireDraftLength(d_max=16, w=0.8)
    for a in range(d + 1):
        before = np.array([0.9, 0.5, 0.25, 0.0], np.float32)
        state = policy.init(B).replace(alpha=jnp.asarray(before))
        done = outcome(verified=[True, True, False, True], drafts=[d, d, 0, 0], accepted=[a, a, 0, 0])
        after = policy.update(state, done)
        rate = a / min(a + 1, d)
        want = [0.8 * 0.9 + 0.2 * rate, 0.8 * 0.5 + 0.2 * rate, 0.25, 0.0]
        np.testing.assert_allclose(after.alpha, want, rtol=1e-6)
        assert np.asarray(after.seen).tolist() == [True, True, False, False]


def test_alpha_stays_a_rate() -> None:
    rng, policy = np.random.default_rng(0), AspireDraftLength()
    state, update = policy.init(B), jax.jit(policy.update)
    for _ in range(100):
        d = rng.integers(0, 17, B)
        state = update(state, outcome(verified=d > 0, drafts=d, accepted=rng.integers(0, d + 1)))
        assert np.all((np.asarray(state.alpha) >= 0) & (np.asarray(state.alpha) <= 1))


def test_gamma_init_until_a_row_has_verified_drafts() -> None:
    policy = AspireDraftLength(d_max=8, gamma_init=2, regret_share=None, in_step=False)
    state = policy.init(B).replace(seen=jnp.array([False, False, False, True]), alpha=jnp.full((B,), 0.01))
    assert decide(policy, state, view(8, drafted=[0, 1, 2, 0])) == "DDVV"
    undecided = AspireDraftLength(d_max=8, gamma_init=0, regret_share=None, in_step=False)
    assert decide(undecided, undecided.init(B), view(8)) == "VVVV"


def test_at_d_max_a_row_verifies() -> None:
    policy = AspireDraftLength(d_max=3, regret_share=None, in_step=False)
    cheap = (0.0, 0.0, 1.0, 0.0)
    assert decide(policy, known(policy, 1.0), view(3, cheap, drafted=[0, 1, 2, 3])) == "DDDV"
    assert decide(policy, known(policy, 1.0), view(3, cheap, drafted=[0, 1, 1, 3], limit=[3, 1, 2, 3])) == "DVDV"


def section_5(alpha: float, length: int, selected: float, b: tuple[float, ...], d_max: int) -> np.ndarray:
    """Tokens per time of every gamma, from the paper's formulas, all rows taken as copies of one.

    [(1 - alpha^(gamma + 1)) / (1 - alpha)] / (1 + c gamma) with c = T_draft / T_verify, divided by T_verify: where that
    does not depend on the drafts the paper's argmax. Widths are those of the packed shapes, contexts whole blocks, and
    the refresh layer's read is counted.
    """
    b_model, b_mlp, b_attn, b_pair = b
    stairs = [x for x in PACKED_STAIRS if x < d_max + 1] + [d_max + 1]
    draft = b_model + b_mlp * B * stairs[0] + (b_attn + b_pair) * B * (selected + length / LAYERS)
    rates = []
    for gamma in range(d_max + 1):
        width = next(x for x in stairs if x >= gamma + 1)
        context = -(-length // BLOCK) * BLOCK
        verify = b_model + b_mlp * B * width + b_attn * B * context + b_pair * B * context * (gamma + 1)
        c = draft / verify
        rates.append(sum(alpha**i for i in range(gamma + 1)) / (1 + c * gamma) / verify)
    return np.array(rates)


@pytest.mark.parametrize("per_token", [False, True], ids=["reads", "reads and tokens"])
def test_own_gamma_is_the_papers_argmax(per_token: bool) -> None:
    """Each row drafts until its gamma; random alphas, contexts and coefficients."""
    d_max, rng, trials = 16, np.random.default_rng(2), 60
    policy = AspireDraftLength(d_max=d_max, regret_share=None, in_step=False)
    static = shapes(d_max)

    @jax.jit
    @jax.vmap
    def gamma(alpha: jax.Array, lengths: jax.Array, selected: jax.Array, b: jax.Array) -> jax.Array:
        """The drafts at which each row would stop: how many of d = 0 .. d_max - 1 it goes beyond."""
        state = known(policy, jnp.zeros((B,))).replace(alpha=alpha)

        def goes_on(d: jax.Array) -> jax.Array:
            rows = jnp.ones((B,), jnp.int32)
            v = View(rows > 0, rows * d, rows * d_max, lengths, selected, jnp.int32(0), tiny.CostModel(b), static)
            return policy.decide(state, v) == DRAFT

        return jnp.sum(jax.vmap(goes_on)(jnp.arange(d_max)), axis=0)

    alpha = np.where(rng.random((trials, B)) < 0.1, 1.0, rng.random((trials, B)) ** 0.3).astype(np.float32)
    lengths = rng.integers(1, CAPACITY, (trials, B)).astype(np.int32)
    selected = (rng.uniform(0.02, 0.6, (trials, B)) * lengths).astype(np.float32)
    b = np.stack([rng.uniform(0, 5000, trials), rng.uniform(0, 30, trials), np.ones(trials), np.zeros(trials)], axis=1)
    b[:, 3] = rng.uniform(0, 0.05, trials)
    b[:, [1, 3]] *= per_token
    got = np.asarray(gamma(alpha, lengths, selected, b.astype(np.float32)))
    seen = set()
    for t in range(trials):
        for i in range(B):
            rates = section_5(float(alpha[t, i]), int(lengths[t, i]), float(selected[t, i]), tuple(b[t]), d_max)
            assert rates[got[t, i]] >= rates.max() * (1 - 1e-5)  # the argmax, or as good to rounding
            seen.add(int(got[t, i]))
    assert len(seen) >= 6  # the trials do tell gammas apart


def test_alpha_near_one_drafts_to_d_max_and_alpha_zero_not_at_all() -> None:
    policy = AspireDraftLength(d_max=6, regret_share=None, in_step=False)
    for alpha in (1.0, 1 - 1e-7, 0.99995):
        assert decide(policy, known(policy, alpha), view(6, drafted=[0, 2, 5, 6])) == "DDDV"
    assert decide(policy, known(policy, 0.0), view(6)) == "VVVV"


def test_rows_mix_and_rows_in_step() -> None:
    alpha = [1.0, 0.0, 1.0, 0.0]
    mixing = AspireDraftLength(d_max=4, regret_share=None, in_step=False)
    assert decide(mixing, known(mixing, alpha), view(4)) == "DVDV"
    together = AspireDraftLength(d_max=4, regret_share=None, in_step=True)
    for drafted, limit, active, alpha, want in (
        ([0, 0, 0, 0], [4, 4, 4, 4], [1, 1, 1, 1], 1.0, "DDDD"),
        ([4, 4, 4, 4], [4, 4, 4, 4], [1, 1, 1, 1], 1.0, "VVVV"),
        ([2, 2, 0, 1], [4, 2, 0, 4], [1, 1, 1, 1], 1.0, "D--D"),  # at its limit, or without a selection: wait
        ([2, 2, 0, 1], [2, 2, 0, 1], [1, 1, 1, 1], 1.0, "VVVV"),
        ([0, 0, 0, 0], [4, 4, 4, 4], [1, 1, 1, 1], 0.0, "VVVV"),
        ([0, 4, 0, 4], [4, 4, 4, 4], [0, 1, 0, 1], 1.0, "VVVV"),  # inactive rows hold nobody up
    ):
        v = view(4, drafted=drafted, limit=limit, active=np.array(active, bool), dense=True, mixed=False)
        assert decide(together, known(together, alpha), v) == want


def test_shared_gamma_maximises_the_batchs_tokens_per_time() -> None:
    """By hand, with shapes that read every row whole: T_draft and T_verify of the batch, one gamma for all."""
    d_max, b = 5, (500.0, 20.0, 1.0, 0.02)
    policy = AspireDraftLength(d_max=d_max, regret_share=None, in_step=True)
    lengths, selected = [4000, 3500, 4090, 3000], [200.0, 300.0, 250.0, 100.0]
    draft = b[0] + b[1] * B + (b[2] + b[3]) * sum(s + n / LAYERS for s, n in zip(selected, lengths, strict=True))
    seen = set()
    for alpha in ([0.5] * 4, [0.7] * 4, [0.9] * 4, [1.0] * 4, [0.0, 0.9, 0.9, 0.9], [0.0, 0.0, 0.0, 0.99]):
        rates = []
        for gamma in range(d_max + 1):
            verify = b[0] + b[1] * B * (gamma + 1) + B * CAPACITY * (b[2] + b[3] * (gamma + 1))
            copy = b[2] * COPY_READS * sum(selected) * (gamma > 0)
            rates.append(sum(sum(a**i for i in range(gamma + 1)) for a in alpha) / (gamma * draft + verify + copy))
        best = int(np.argmax(rates))
        state = known(policy, alpha)
        for d in range(d_max + 1):
            v = view(d_max, b, drafted=[d] * B, lengths=lengths, selected=selected, dense=True, mixed=False)
            assert decide(policy, state, v) == ("DDDD" if d < best else "VVVV")
        seen.add(best)
    assert len(seen) >= 3


def test_forget_resets_a_row_alone() -> None:
    policy = AspireDraftLength()
    state = known(policy, [0.1, 0.2, 0.3, 0.4]).replace(ledger=Ledger(jnp.float32(5), jnp.float32(4)))
    after = policy.forget(state, jnp.array([False, True, False, False]))
    np.testing.assert_allclose(after.alpha, [0.1, 0.9, 0.3, 0.4], rtol=1e-6)
    assert np.asarray(after.seen).tolist() == [True, False, True, True]
    assert (float(after.ledger.spent), float(after.ledger.earned)) == (5, 4)


def test_guard_by_hand() -> None:
    """Blocked once spent - earned exceeds share * earned + steps * plain; a draft under way goes on."""
    policy = AspireDraftLength(d_max=3, regret_share=0.1, regret_steps=2.0, in_step=False)
    plain = float(tiny.cost().seconds(jnp.array([1.0, B, B * 1024.0, B * 1024.0])))  # one token in every row
    for earned in (0.0, 50.0, 1000.0):
        allowed = 0.1 * earned + 2 * plain
        for factor, drafted, want in ((0.99, 0, "DDDD"), (1.01, 0, "VVVV"), (1.01, 1, "VVVV")):
            state = known(policy, 1.0).replace(
                ledger=Ledger(jnp.float32(earned + factor * allowed), jnp.float32(earned))
            )
            v = view(3, drafted=[drafted] * B)
            got = decide(policy, state, v)
            # Drafts held are worth tokens already, so a draft under way is not cut short.
            assert got == (want if drafted == 0 else "DDDD")


def test_guard_blocks_a_policy_that_loses_and_lets_it_try_again_later() -> None:
    """Every draft is rejected though the estimator believes in it: the loss stays within the allowance."""
    share, d_max = 0.05, 3
    policy = AspireDraftLength(d_max=d_max, w=1.0, alpha_0=0.95, regret_share=share, regret_steps=1.0, in_step=True)
    prices = (1.0, 0.0, 0.01, 0.0)
    update, state, drafted, costs = jax.jit(policy.update), policy.init(B), 0, tiny.cost(*prices)
    ones, nobody, lengths = jnp.ones((B,), jnp.int32), jnp.zeros((B,), bool), jnp.full((B,), 1024)
    s, selected = shapes(d_max), jnp.full((B,), 128.0)
    draft = float(costs.seconds(s.forecast(~nobody, ones, lengths, selected)))
    verify = [float(costs.seconds(s.forecast(nobody, ones * (d + 1), lengths, selected))) for d in range(d_max + 1)]
    arrays = view(d_max, prices)
    f = jax.jit(lambda state, d: policy.decide(state, arrays._replace(drafted=jnp.full((B,), d))))
    spent = earned = 0.0
    tries, history = 0, []
    for _ in range(900):
        drafts = int(f(state, jnp.int32(drafted))[0]) == DRAFT
        tries += drafts and drafted == 0
        seconds = draft if drafts else verify[drafted]
        n = 0 if drafts else 1
        done = outcome(
            verified=np.full(B, not drafts),
            drafts=np.full(B, drafted * n),
            emitted=np.full(B, n),
            seconds=np.float32(seconds),
            plain_seconds=np.float32(verify[0]),
        )
        state, drafted = update(state, done), drafted + 1 if drafts else 0
        spent, earned = spent + seconds, earned + n * verify[0]
        history.append(tries)
    one_round = d_max * draft + verify[d_max] - verify[0]
    assert spent - earned <= share * earned + verify[0] + one_round
    assert 2 <= history[200] < tries  # blocked, then allowed again as plain steps earned it


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"d_max": 0}, "d_max: 0, expected 1 to 32"),
        ({"d_max": 2, "gamma_init": 3}, r"gamma_init: 3, expected 0 to d_max \(2\)"),
        ({"w": 1.5}, "w: 1.5"),
        ({"alpha_0": -0.1}, "alpha_0: -0.1"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        AspireDraftLength(**fields)


def test_a_fixed_length_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="gamma: 0, expected 1 to 32"):
        FixedDraftLength(gamma=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regret_steps": float("inf")}, r"regret_steps: inf, expected 0 to"),
        ({"regret_steps": float("nan")}, r"regret_steps: nan, expected 0 to"),
        ({"regret_share": -0.1}, r"regret_share: -0.1, expected 0 to"),
        ({"d_max": 33}, r"d_max: 33, expected 1 to 32"),
    ],
)
def test_bounds_of_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AspireDraftLength(**options)  # type: ignore[arg-type]
