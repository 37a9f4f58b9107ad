"""What the recording policy keeps, against plain decoding and an attention of one layer computed apart."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import model, rope
from aspire_jax.context import RefreshContext
from aspire_jax.draft_length import Record, RecordDraftLength, Signals
from aspire_jax.instrument import recall_of

from . import tiny
from .policies import B, decide, outcome, view
from .tiny import PAGE, Request

NEW, D_MAX = 14, 3
SPARSE = RefreshContext(k_min=3, recent=1, rho=0.0, renew="step")


def test_recall_by_hand() -> None:
    """One row, two heads, three pages of two tokens, three drafts held of which two have a query."""
    weights = jnp.array([[0.1, 0.1, 0.2, 0.0, 0.1, 0.0], [0.4, 0.0, 0.0, 0.0, 0.0, 0.4]])[None, None, None]
    weights = jnp.concatenate([weights, weights[..., ::-1]], axis=1)  # the second query sees the mirror image
    read = jnp.array([[[0, -1]], [[0, 2]], [[1, 2]]], jnp.int32)
    got = recall_of(weights, read, 2)
    want = [(0.2 / 0.5 + 0.4 / 0.8) / 2, (0.3 / 0.5 + 0.8 / 0.8) / 2, np.nan]
    np.testing.assert_allclose(got, [want], rtol=1e-5)


def test_buffers_by_hand() -> None:
    """Two drafts in rows 0 and 1, one in row 2, then all verify: what was told stands at the position it began at."""
    policy = RecordDraftLength(d_max=2, positions=4)
    state = policy.init(B)
    state = state.replace(position=jnp.array([1, 2, 3, 0]))
    for drafted, token in (([True, True, True, False], [7, 8, 9, -1]), ([True, True, False, False], [5, 6, -1, -1])):
        known = Signals(*(jnp.where(jnp.array(drafted), float(t), np.nan) for t in range(4)))
        done = outcome(drafted=drafted, token=token, signals=known, recall=np.full((B, 2), np.nan, np.float32))
        state = policy.update(state, done)
    half = np.full((B, 2), 0.5, np.float32)
    done = outcome(verified=[True] * B, drafts=[2, 2, 1, 0], accepted=[2, 0, 1, 0], emitted=[3, 1, 1, 1], recall=half)
    state = policy.update(state, done)
    assert state.position.tolist() == [4, 3, 4, 1] and state.held.tolist() == [0] * B
    assert state.drafted.tolist() == [[-1, 2, -1, -1], [-1, -1, 2, -1], [-1, -1, -1, 1], [-1] * 4]
    assert state.accepted.tolist() == [[-1, 2, -1, -1], [-1, -1, 0, -1], [-1, -1, -1, 1], [-1] * 4]
    assert state.token[0].tolist() == [[-1, -1], [7, 5], [-1, -1], [-1, -1]]
    assert state.token[2, 3].tolist() == [9, -1]
    np.testing.assert_array_equal(state.signals.margin[0, 1], [1, 1])
    np.testing.assert_array_equal(state.recall[2], [[np.nan] * 2] * 3 + [[0.5, np.nan]])
    state = policy.forget(state, jnp.array([True, False, False, False]))
    assert state.position.tolist() == [0, 3, 4, 1] and (state.drafted[0] == -1).all() and (state.drafted[1] == 2).any()


def test_rows_draft_as_far_as_they_may_and_verify_together() -> None:
    policy = RecordDraftLength(d_max=3, positions=4)
    state = policy.init(B)
    assert decide(policy, state, view(3, drafted=[0, 1, 3, 0], limit=[3, 1, 3, 0])) == "D---"
    assert decide(policy, state, view(3, drafted=[3, 1, 3, 0], limit=[3, 1, 3, 0])) == "VVVV"


@pytest.mark.parametrize("fields", [{"d_max": 0}, {"d_max": 33}, {"cadence": "all"}])
def test_bad_options(fields: dict[str, Any]) -> None:
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=f"{name}: {value!r}, expected"):
        RecordDraftLength(**fields)


def recorded(
    c: Any, context: RefreshContext, cadence: Literal["accepted", "every"], prompts: list, **fields: Any
) -> tuple[list[tiny.Answer], Record]:
    engine = tiny.make(
        c, context, RecordDraftLength(d_max=D_MAX, cadence=cadence, positions=24), mixed=False, batch=3, **fields
    )
    answers, state = tiny.serve(engine, [Request(p, NEW) for p in prompts])
    tiny.assert_same(answers, tiny.greedy(c, prompts, NEW))
    return answers, jax.tree.map(np.asarray, state.draft_length)


OTHER = {"unrolled": False, "dense": False, "consecutive": False}


@pytest.mark.parametrize(("cadence", "layout"), [("accepted", {}), ("every", OTHER)], ids=["accepted", "every"])
def test_accepted_lengths_are_the_drafts_common_prefix_with_the_answer(cadence: Any, layout: dict[str, Any]) -> None:
    prompts = tiny.prompts((13, 40, 7))
    answers, kept = recorded(tiny.config(layers=3), SPARSE, cadence, prompts, **layout)
    rejected = 0
    for row, a in enumerate(answers):
        (starts,) = np.nonzero(kept.drafted[row] > 0)
        for p in starts:
            n = kept.drafted[row, p]
            assert n == min(D_MAX, NEW - p - 1)
            draft = kept.token[row, p]
            assert (draft[:n] >= 0).all() and (draft[n:] == -1).all()
            same = [d == t for d, t in zip(draft[:n], a.tokens[p : p + n], strict=True)]
            assert kept.accepted[row, p] == (same.index(False) if False in same else n)
            rejected += False in same
            for x in (*kept.signals, kept.recall):
                assert np.isfinite(x[row, p, :n]).all() and np.isnan(x[row, p, n:]).all()
        behind = np.ones_like(starts) if cadence == "every" else kept.accepted[row, starts] + 1
        assert starts[0] == 1  # the first token comes from the prompt alone
        assert starts[1:].tolist() == (starts + behind)[:-1].tolist()
        assert (starts + behind)[-1] >= NEW - 1
    assert rejected > 2
    assert 0 < np.nanmin(kept.recall) < 0.9 and np.nanmax(kept.recall) <= 1 + 1e-5


def test_signals_and_recall_against_an_attention_apart() -> None:
    """One layer, one head, refreshed at every draft: selections, attention outside them and recall, in NumPy.

    The keys of the only layer depend on nothing but tokens and positions, so all of it can be had without the engine.
    """
    c = tiny.config(layers=1, heads=1)
    (prompt,) = prompts = tiny.prompts((41,))
    (a,), kept = recorded(c, SPARSE, "every", prompts)

    @jax.jit
    def project(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        position = jnp.arange(64, dtype=jnp.int32)
        layer, x = model.layer_of(tiny.weights(c), 0), tiny.weights(c)["embed"][tokens]
        q, k, _ = model.project(c, layer, x, rope.rotation(c.rope, c.head_dim, c.max_length, position))
        return q[:, 0, 0], k[:, 0]

    def weights(sequence: list[int], committed: int) -> np.ndarray:
        """Attention of the sequence's last token to the committed ones; to the others goes what is missing to one."""
        n = len(sequence)
        q, k = (np.asarray(x) for x in project(np.pad(np.asarray(sequence, np.int32), (0, 64 - n))))
        scores = k[:n] @ q[n - 1] * c.head_dim**-0.5
        w = np.exp(scores - scores.max())
        return (w / w.sum())[:committed]

    def pages(w: np.ndarray) -> np.ndarray:
        return np.pad(w, (0, 64 - len(w))).reshape(-1, PAGE).sum(axis=1)

    def select(mass: np.ndarray, committed: int) -> np.ndarray:
        used = -(-committed // PAGE)
        others = np.argsort(-mass[: used - 1])[:2]
        return np.append(others, used - 1)

    for p in range(1, NEW - 1):
        before = prompt + a.tokens[:p]  # its last token is pending
        committed = len(before) - 1
        # The verification before it emitted one token: first and last query are the token then pending.
        mass = pages(weights(before[:-1], committed - 1))
        for j in range(kept.drafted[0, p]):
            chosen = select(mass, committed)
            w = weights(before + kept.token[0, p, :j].tolist(), committed)
            mass = pages(w)
            inside = mass[chosen].sum()
            np.testing.assert_allclose(kept.signals.outside[0, p, j], w.sum() - inside, atol=1e-5)
            np.testing.assert_allclose(kept.recall[0, p, j], inside / w.sum(), atol=1e-5)
    assert np.nanmin(kept.recall[0]) < 0.9
