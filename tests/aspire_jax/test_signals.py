"""Signals of a draft: worked by hand, and measured by the engine where a policy asks for them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax.context import RefreshContext
from aspire_jax.draft_length import FixedDraftLength, Outcome, Signals
from aspire_jax.signals import measure, outside_of, unknown

from . import tiny
from .tiny import Request

MODEL = next(iter(tiny.MODELS.values()))
ALL = Signals._fields


def test_by_hand() -> None:
    """Probabilities 1/2, 1/4, 1/4, 0: entropy 1.5 ln 2; the margin of a draft that is not the best is negative."""
    p = np.array([[0.5, 0.25, 0.25, 0.0]] * 3)
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.maximum(np.log(p) + 7, -1e4), jnp.float32)
    token, drafting = jnp.array([0, 1, 0]), jnp.array([True, True, False])
    known = measure(ALL, logits, token, jnp.array([0.25, 0.5, 0.75]), drafting)
    np.testing.assert_allclose(known.top_probability, [0.5, 0.25, np.nan], rtol=1e-6)
    np.testing.assert_allclose(known.margin, [math.log(2), -math.log(2), np.nan], rtol=1e-5)
    np.testing.assert_allclose(known.entropy, [1.5 * math.log(2)] * 2 + [np.nan], rtol=1e-6)
    np.testing.assert_allclose(known.outside, [0.25, 0.5, np.nan])


@pytest.mark.parametrize("asked", [(), ("margin",), ("entropy", "outside")])
def test_only_what_is_asked_for(asked: tuple[str, ...]) -> None:
    known = measure(asked, jnp.ones((2, 5)), jnp.zeros(2, jnp.int32), None, jnp.ones(2, bool))
    for name, value in known._asdict().items():
        assert np.isfinite(value).all() == (name in asked and name != "outside")


def test_outside_by_hand() -> None:
    """One row, two heads, pages of two tokens: 0.1 + 0.2 and 0.05 + 0.05 lie on page 1, which is not selected."""
    weights = jnp.array([[0.3, 0.1, 0.1, 0.2, 0.1, 0.1], [0.4, 0.3, 0.05, 0.05, 0.0, 0.0]])[None, None, None]
    got = outside_of(weights, jnp.array([[2, -1, 0]], jnp.int32), 2)
    np.testing.assert_allclose(got, [(0.3 + 0.1) / 2], rtol=1e-5)
    np.testing.assert_allclose(outside_of(weights, jnp.array([[-1]], jnp.int32), 2), [(0.9 + 0.8) / 2], rtol=1e-5)


def test_attention_outside_a_selection_of_each_kv_head() -> None:
    """Head 0 reads page 1 and misses 0.2, head 1 reads page 0 and misses 0.6."""
    weights = jnp.asarray([[0.1, 0.1, 0.5, 0.3], [0.2, 0.2, 0.2, 0.4]], jnp.float32)[None, None, :, None]
    got = outside_of(weights, jnp.array([[[1, -1], [-1, 0]]], jnp.int32), 2)
    np.testing.assert_allclose(got, [(0.2 + 0.6) / 2], rtol=1e-5)


@flax.struct.dataclass
class Told:
    """Every step's signals [steps, 4, B] and drafts [steps, B], and how many steps there were."""

    signals: jax.Array
    token: jax.Array
    drafted: jax.Array
    steps: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listener(FixedDraftLength):
    """Keeps what it is told."""

    signals: tuple[str, ...] = ALL

    def init(self, batch: int) -> Told:
        most = 40
        known = jnp.stack(unknown(batch))[None]
        none = jnp.zeros((most, batch), bool)
        return Told(jnp.repeat(known, most, axis=0), none.astype(jnp.int32) - 1, none, jnp.int32(0))

    def update(self, state: Told, outcome: Outcome) -> Told:
        i = state.steps
        return Told(
            state.signals.at[i].set(jnp.stack(outcome.signals)),
            state.token.at[i].set(outcome.token),
            state.drafted.at[i].set(outcome.drafted),
            i + 1,
        )


def listen(context: RefreshContext, **fields: Any) -> tuple[list[tiny.Answer], Told]:
    engine = tiny.make(MODEL, context, Listener(gamma=2), mixed=False, **fields)
    answers, state = tiny.serve(engine, [Request(p, 13) for p in tiny.prompts((20, 33, 7))])
    return answers, jax.tree.map(np.asarray, state.draft_length)


@pytest.mark.parametrize("unrolled", [True, False])
def test_where_a_draft_reads_everything_its_signals_are_those_of_the_target(unrolled: bool) -> None:
    answers, told = listen(RefreshContext(k_min=16, renew="step"), unrolled=unrolled)
    for row, a in enumerate(answers):
        assert a.accepted == a.drafted > 0
        made = told.drafted[:, row]
        signals = dict(zip(ALL, told.signals[made, :, row].T, strict=True))
        assert np.isnan(told.signals[~made, :, row]).all() and (told.token[~made, row] == -1).all()
        # The first token comes from the first verification; then two drafts and a token of the target in turns.
        place = [i for i in range(1, 13) if i % 3]
        assert told.token[made, row].tolist() == [a.tokens[i] for i in place]
        np.testing.assert_allclose(signals["margin"], [a.margins[i] for i in place], atol=1e-4)
        p, entropy = signals["top_probability"], signals["entropy"]
        assert ((p > 1 / tiny.VOCAB) & (p < 1)).all() and ((entropy > 0) & (entropy < math.log(tiny.VOCAB))).all()
        # The best token alone, and the others as even as they can be, bound the entropy.
        most = -p * np.log(p) - (1 - p) * np.log((1 - p) / (tiny.VOCAB - 1))
        assert (entropy <= most + 1e-5).all() and (entropy >= -np.log(p) - 1e-5).all()
        np.testing.assert_allclose(signals["outside"], 0, atol=1e-6)


@pytest.mark.parametrize("renew", ["step", "verification"])
def test_outside_is_measured_where_a_layer_reads_everything(renew: Any) -> None:
    _, told = listen(RefreshContext(k_min=2, recent=1, rho=0.1, renew=renew))
    outside = told.signals[:, ALL.index("outside")][told.drafted]
    if renew == "step":
        assert outside.min() >= 0 and outside.max() <= 1 and np.mean(outside > 0.05) > 0.5
    else:
        assert np.isnan(outside).all()
