"""The feedback policy, worked by hand from its rule: +1 after full acceptance, -1 otherwise, within 1 to d_max."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import methods
from aspire_jax.draft_length import FsmDraftLength

from . import tiny
from .policies import B, decide, outcome, view


def test_each_row_drafts_to_its_own_gamma() -> None:
    policy = FsmDraftLength(d_max=8, gamma_init=3)
    state = policy.init(B)
    assert decide(policy, state, view(8, drafted=[0, 2, 3, 4])) == "DDVV"
    assert decide(policy, state, view(8, drafted=[0, 1, 2, 2], limit=[0, 1, 2, 8])) == "VVVD"
    state = state.replace(gamma=jnp.array([1, 2, 8, 4]))
    assert decide(policy, state, view(8, drafted=[1, 1, 7, 4])) == "VDDV"


def test_feedback_by_hand() -> None:
    """Rows: all accepted, one rejected, none accepted, no drafts; then one that only drafts."""
    policy = FsmDraftLength(d_max=5, gamma_init=3)
    state = policy.init(B)
    done = {"verified": [True] * 4, "drafts": [3, 3, 3, 0], "accepted": [3, 2, 0, 0], "emitted": [4, 3, 1, 1]}
    state = policy.update(state, outcome(**done))
    assert state.gamma.tolist() == [4, 2, 2, 3]
    done = {"verified": [True, False, True, True], "drafts": [4, 0, 2, 3], "accepted": [4, 0, 1, 3]}
    state = policy.update(state, outcome(**done))
    assert state.gamma.tolist() == [5, 2, 1, 4]
    done = {"verified": [True] * 4, "drafts": [5, 2, 1, 4], "accepted": [5, 2, 0, 0]}
    state = policy.update(state, outcome(**done))
    assert state.gamma.tolist() == [5, 3, 1, 3]  # held at d_max and at 1
    # At the end of a request a row verifies fewer drafts than its gamma: they count as any others.
    state = policy.update(state, outcome(verified=[True] * 4, drafts=[2, 1, 1, 1], accepted=[2, 0, 1, 0]))
    assert state.gamma.tolist() == [5, 2, 2, 2]
    state = policy.forget(state, jnp.array([False, True, False, True]))
    assert state.gamma.tolist() == [5, 3, 2, 3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_max": 0}, "d_max: 0, expected 1 to 32"),
        ({"d_max": 33}, "d_max: 33, expected 1 to 32"),
        ({"gamma_init": 0}, r"gamma_init: 0, expected 1 to d_max \(16\)"),
        ({"d_max": 2, "gamma_init": 3}, r"gamma_init: 3, expected 1 to d_max \(2\)"),
    ],
)
def test_bad_options(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FsmDraftLength(**fields)


def test_method() -> None:
    """The row of the table: rows mix, the context is ASPIRE's, refreshed at every step; answers are those of plain."""
    options = {"d_max": 2, "k_min": 3, "rho": 0.1}
    engine = methods.configure(
        tiny.config(), "aspire-fsm", batch=4, capacity=64, max_new=24, options=options, page_size=tiny.PAGE
    )
    assert engine.mixed and engine.draft_length == FsmDraftLength(d_max=2, gamma_init=2)
    assert engine.plan.renew == "step" and engine.plan.refresh_layers
    prompts = tiny.prompts((13, 40, 7, 30))
    answers, state = tiny.serve(engine, [tiny.Request(p) for p in prompts])
    tiny.assert_same(answers, tiny.greedy(engine.config, prompts, 24))
    assert sum(a.accepted for a in answers) > 0
    gamma = np.asarray(state.draft_length.gamma)
    assert ((gamma >= 1) & (gamma <= 2)).all()
