"""Whole answers through the engine follow the target: the joint distribution of three tokens, 221,184 draws."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from aspire_jax import engine as eng
from aspire_jax import model, step
from aspire_jax.context import RefreshContext
from aspire_jax.draft_length import FixedDraftLength
from aspire_jax.sampling.rows import ACCEPTANCES, Acceptance, Support

from . import sampling_reference as reference
from . import tiny

C = tiny.config(layers=2, heads=2, kv=1, vocab_size=6, d_model=16, d_ff=16, head_dim=8)
V, BATCH, ROUNDS = C.vocab_size, 2048, 36
PROMPT = np.random.default_rng(2).integers(0, V, 21)
FIELDS = {"temperature": 1.2, "top_p": 0.97, "repetition": 1.3}


def engine_of(acceptance: Acceptance) -> eng.Engine:
    """Reads one page of two tokens while drafting, so that many drafts are wrong."""
    context = RefreshContext(k_min=2, recent=1, rho=0.0, renew="verification")
    support = Support(acceptance=acceptance, penalties=True)
    fields: dict[str, Any] = {"batch": BATCH, "capacity": 24, "max_new": 3, "max_stop": 1, "page_size": 2}
    return tiny.make(C, context, FixedDraftLength(gamma=1), mixed=False, sampling=support, **fields)


@functools.cache
def exact() -> tuple[np.ndarray, np.ndarray]:
    """[V, V, V] probability of each answer of three tokens."""
    p = np.zeros((V, V, V))
    logits = jax.jit(model.dense_logits, static_argnums=0)
    s = tiny.settings(Support(penalties=True), vocabulary=V, **FIELDS)

    def after(answer: list[int]) -> np.ndarray:
        padded = np.pad([*PROMPT, *answer], (0, 2 - len(answer)))
        x = np.asarray(logits(C, tiny.weights(C), jnp.asarray(padded)))[len(PROMPT) + len(answer) - 1]
        return reference.probabilities(s, reference.processed(s, x, PROMPT.tolist(), answer, ()))

    first = after([])
    for i in np.flatnonzero(first):
        second = after([int(i)])
        for j in np.flatnonzero(second):
            p[i, j] = first[i] * second[j] * after([int(i), int(j)])
    return p


# That coupled answers are those of the contract, token by token, stands in test_sampling_contract.py.
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_answers_of_three_tokens(acceptance: Acceptance) -> None:
    engine, weights = engine_of(acceptance), tiny.params_of(engine_of(acceptance))
    state = tiny.start(engine)
    settings = tiny.settings(engine.sampling, vocabulary=V, seen=np.isin(np.arange(V), PROMPT), **FIELDS)
    state = tiny.put(engine, weights, state, 0, tiny.Request(PROMPT, 3, (), settings))
    # What one slot holds, every slot holds: its pages, and all that is said of its request.
    per_row = lambda x: jnp.repeat(x[:1], BATCH, axis=0)  # noqa: E731
    pages = lambda x: jnp.tile(x[:, : engine.pages], (1, BATCH, 1, 1))  # noqa: E731
    state = state.replace(
        cache=jax.tree.map(pages, state.cache),
        slots=jax.tree.map(per_row, state.slots).replace(table=state.slots.table),
        sampling=jax.tree.map(per_row, state.sampling),
    )

    @jax.jit
    def answers(state: eng.State) -> tuple[jax.Array, jax.Array, jax.Array]:
        def one(i: jax.Array, counts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row = jnp.arange(BATCH, dtype=jnp.uint32)
            keys = jnp.stack([jnp.full((BATCH,), 11, jnp.uint32), i.astype(jnp.uint32) * BATCH + row], axis=1)
            begin = state.replace(sampling=state.sampling.replace(settings=state.sampling.settings.replace(key=keys)))
            s = step.run(engine, weights, begin, jnp.int32(50), jnp.int32(BATCH)).slots
            cell = s.out[:, 0] * (V * V) + s.out[:, 1] * V + s.out[:, 2]
            counted, drafted, accepted = counts
            return counted.at[cell].add(1), drafted + s.drafted_total.sum(), accepted + s.accepted_total.sum()

        zero = jnp.zeros((V**3,), jnp.int32)
        return jax.lax.fori_loop(0, ROUNDS, one, (zero, jnp.int32(0), jnp.int32(0)))

    observed, drafted, accepted = (np.asarray(x) for x in answers(state))
    n = BATCH * ROUNDS
    assert observed.sum() == n >= 200_000 / 3 and drafted == n
    assert 0.3 * n < accepted < 0.97 * n
    expected = exact().ravel() * n
    assert observed[expected == 0].sum() == 0
    often = expected >= 5
    o, e = (np.append(x[often], x[~often].sum()) for x in (observed, expected))
    o, e = o[e > 0], e[e > 0]
    assert len(e) > 40
    assert stats.chi2.sf(((o - e) ** 2 / e).sum(), len(e) - 1) > 1e-5
