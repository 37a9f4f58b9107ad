"""Plain decoding by a program of its own, in between: the same tokens, and drafting goes on as if nothing had been."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aspire_jax
from aspire_jax import Model, host, pause, programs, step
from aspire_jax import engine as eng
from aspire_jax.context import BlendContext, RefreshContext
from aspire_jax.draft_length import (
    AdaptiveDraftLength,
    AspireDraftLength,
    FixedDraftLength,
    Outcome,
    RecordDraftLength,
    View,
    in_step,
)
from aspire_jax.methods import METHODS, Method
from aspire_jax.sampling.rows import Support

from . import tiny
from .tiny import Request

MODEL = next(iter(tiny.MODELS.values()))
NEW = 24
PROMPTS = tiny.prompts((2, 13, 40, 7, 30, 21))
rest = tiny._jit(pause.run, donate_argnums=2)


@flax.struct.dataclass
class Told:
    """Tokens emitted by the whole batch, and steps, that the policy was told of; scalars."""

    emitted: jax.Array
    steps: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases:
    """Drafts `d_max` tokens at a time for `phase` tokens of the batch, nothing for as many, and so on."""

    d_max: int = 2
    phase: int = 20
    pauses: bool = True

    def init(self, batch: int) -> Told:
        return Told(*jnp.zeros((2,), jnp.int32))

    def decide(self, state: Told, view: View) -> jax.Array:
        drafts = (state.emitted // self.phase) % 2 == 0
        return in_step(view.active & drafts & (view.drafted < view.limit))

    def update(self, state: Told, outcome: Outcome) -> Told:
        return Told(state.emitted + jnp.sum(outcome.emitted), state.steps + 1)

    def forget(self, state: Told, rows: jax.Array) -> Told:
        return state


def engine(draft: Any = None, renew: str = "verification", **fields: Any) -> eng.Engine:
    context = RefreshContext(k_min=3, recent=1, rho=0.1, renew=renew)  # type: ignore[arg-type]
    return tiny.make(MODEL, context, draft or Phases(), **{"mixed": False} | fields)


EVERYTHING = Support(acceptance="rejection", penalties=True, bias=True, logprobs=2)
ENGINES = {
    "dense": engine(),
    "packed, scanned, shuffled": engine(dense=False, unrolled=False, consecutive=False),
    "mixed": engine(mixed=True, renew="step"),
    "reproducible": engine(capacity=512, reproducible=True),
    "kernels": engine(
        implementation="pallas", interpret=True, dense=False, unrolled=False, mixed=True, renew="step", batch=2
    ),
}


def serve(
    e: eng.Engine, requests: list[Request], patience: int = 2, burst: int = 5
) -> tuple[list[tiny.Answer], eng.State, int]:
    """As `tiny.serve`, with both programs in turns as the host does it; also returns the steps taken in pauses."""
    weights, paused, pausing = tiny.params_of(e), 0, False

    def run(e: eng.Engine, weights: Any, state: eng.State, most: jax.Array, finished: jax.Array) -> eng.State:
        nonlocal paused, pausing
        before = int(jnp.sum(state.shape_steps))
        if pausing:
            state = rest(e, weights, state, most, finished)
            paused += int(jnp.sum(state.shape_steps)) - before
            pausing = int(jnp.sum(state.shape_steps)) > before
            return state
        state = tiny_run(e, weights, state, most, finished, jnp.int32(-1), jnp.int32(patience))
        pausing = int(state.idle) >= patience
        return state

    tiny_run = tiny.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "run", run)
        answers, state = tiny.serve(e, requests, burst=burst, weights=weights)
    return answers, state, paused


@pytest.mark.parametrize("e", ENGINES.values(), ids=ENGINES)
def test_the_tokens_are_plain_decodings(e: eng.Engine) -> None:
    """Six requests on two or four slots, drafting and pausing in turns."""
    answers, state, paused = serve(e, [Request(p, NEW) for p in PROMPTS])
    tiny.assert_same(answers, tiny.greedy(MODEL, PROMPTS, NEW))
    assert all(len(a.tokens) == NEW == a.accepted + a.verifications for a in answers)
    assert all(a.steps >= a.verifications for a in answers)
    assert sum(a.drafted for a in answers) >= 10 <= paused
    told = state.draft_length
    assert int(told.emitted) == NEW * len(PROMPTS)
    assert int(told.steps) == int(jnp.sum(state.shape_steps)) == int(state.work[0])


def test_bits_are_those_of_plain_decoding_where_reproducible() -> None:
    e = ENGINES["reproducible"]
    plain = tiny.make(MODEL, reproducible=True, capacity=512)
    requests = [Request(p, NEW) for p in PROMPTS]
    answers, _, paused = serve(e, requests)
    truth, _ = tiny.serve(plain, requests)
    assert paused > 0
    assert [a.tokens for a in answers] == [a.tokens for a in truth]
    assert [a.margins for a in answers] == [a.margins for a in truth]


def test_sampled_rows_pause_too() -> None:
    """Penalties count what was emitted in either program, and draws are those of the position."""
    support = dataclasses.replace(EVERYTHING, acceptance="coupled")
    fields = {"temperature": 0.8, "frequency": 0.7, "repetition": 1.3, "logprobs": True}
    requests = [Request(p, NEW, settings=tiny.settings(support, seed=i, **fields)) for i, p in enumerate(PROMPTS)]
    truth, plain = tiny.serve(tiny.make(MODEL, sampling=support), requests)
    answers, state, paused = serve(engine(sampling=support), requests)
    assert paused > 0 < sum(a.drafted for a in answers)
    assert [a.tokens for a in answers] == [a.tokens for a in truth]
    assert state.sampling is not None and plain.sampling is not None
    seen, expected = np.asarray(state.sampling.settings.seen), np.asarray(plain.sampling.settings.seen)
    assert sorted(map(tuple, seen)) == sorted(map(tuple, expected))


def test_proposals_survive_a_pause() -> None:
    e = engine(sampling=EVERYTHING)
    state = tiny.put(e, tiny.params_of(e), tiny.start(e), 0, Request(PROMPTS[0], 9, settings=tiny.settings(EVERYTHING)))
    assert state.sampling is not None
    marked = dataclasses.replace(state.sampling, proposals=state.sampling.proposals + 3)
    state = dataclasses.replace(state, sampling=marked, draft_length=Told(jnp.int32(20), jnp.int32(0)))
    after = rest(e, tiny.params_of(e), state, jnp.int32(4), jnp.int32(4))
    assert after.slots.emitted.tolist() == [4, 0, 0, 0]
    assert after.sampling is not None and (np.asarray(after.sampling.proposals) == 3).all()


def begun(e: eng.Engine, told: int = 20) -> eng.State:
    """Two requests, in slots 0 and 2, that have taken one step; the policy had been told of `told` tokens before it."""
    state = tiny.start(e)
    for slot, prompt in ((0, PROMPTS[2]), (2, PROMPTS[4])):
        state = tiny.put(e, tiny.params_of(e), state, slot, Request(prompt, NEW))
    state = dataclasses.replace(state, draft_length=Told(jnp.int32(told), jnp.int32(0)))
    return tiny.run(e, tiny.params_of(e), state, jnp.int32(1), jnp.int32(4))


def test_a_pause_ends_when_the_policy_wants_to_draft() -> None:
    e = engine()
    after = rest(e, tiny.params_of(e), begun(e), jnp.int32(50), jnp.int32(4))
    assert int(after.draft_length.emitted) == 40  # two rows from 22 on
    assert after.slots.emitted.tolist() == [10, 0, 10, 0]
    assert after.slots.fresh.tolist() == [True] * 4  # the free slots were before
    assert int(after.idle) == 10
    again = rest(e, tiny.params_of(e), after, jnp.int32(50), jnp.int32(4))
    assert again.slots.emitted.tolist() == [10, 0, 10, 0] and int(again.work[0]) == 10


def test_a_pause_of_no_step_changes_nothing() -> None:
    e = engine()
    before = begun(e, told=0)
    wanted = jax.tree.map(np.array, before)
    after = rest(e, tiny.params_of(e), before, jnp.int32(50), jnp.int32(4))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
    assert not after.slots.fresh[0] and not after.slots.fresh[2]


def test_limits_of_a_pause() -> None:
    """Steps, and rows that finish."""
    e = engine(Phases(phase=1000))
    after = rest(e, tiny.params_of(e), begun(e, told=1000), jnp.int32(3), jnp.int32(4))
    assert after.slots.emitted.tolist() == [4, 0, 4, 0]
    slots = dataclasses.replace(after.slots, max_new=jnp.asarray([9, 0, 20, 0]))
    after = rest(e, tiny.params_of(e), dataclasses.replace(after, slots=slots), jnp.int32(50), jnp.int32(0))
    assert after.slots.emitted.tolist() == [9, 0, 9, 0]
    assert after.slots.active.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    "context", [RefreshContext(k_min=2, recent=1, rho=0.1, renew="verification"), BlendContext(least=16, sinks=4)]
)
def test_after_a_pause_rows_verify_first_and_select_by_that(context: Any) -> None:
    """The same selection, drafts and tokens as if every step had been measured."""
    e = tiny.make(MODEL, context, Phases(), mixed=False)
    weights = tiny.params_of(e)
    paused = rest(e, weights, begun(e), jnp.int32(50), jnp.int32(4))
    measured = tiny.run(e, weights, begun(e), jnp.int32(9), jnp.int32(4))
    assert measured.slots.emitted.tolist() == paused.slots.emitted.tolist()
    assert int(measured.slots.drafted.sum()) == 0
    one, rows = jnp.int32(1), jnp.int32(4)
    paused = tiny.run(e, weights, paused, one, rows)  # the policy wants a draft, the row must verify
    assert paused.slots.drafted.tolist() == [0] * 4 and paused.slots.emitted.tolist() == [11, 0, 11, 0]
    held = dataclasses.replace(measured, draft_length=Told(jnp.int32(20), jnp.int32(0)))
    measured = tiny.run(e, weights, held, one, rows)
    np.testing.assert_array_equal(tiny.selection(e, paused)[:, [0, 2]], tiny.selection(e, measured)[:, [0, 2]])
    told = jax.tree.map(jnp.array, paused.draft_length)
    for state in (paused, dataclasses.replace(measured, draft_length=told)):
        state = tiny.run(e, weights, state, jnp.int32(2), rows)
        assert state.slots.drafted.tolist() == [2, 0, 2, 0]


def test_patience() -> None:
    """A run ends after so many steps on end without a draft, counted from its begin; held drafts are verified first."""
    e = engine()
    weights, rows, no = tiny.params_of(e), jnp.int32(4), jnp.int32(-1)
    state = tiny.run(e, weights, begun(e), jnp.int32(50), rows, no, jnp.int32(3))
    assert int(state.idle) == 4 and state.slots.steps.tolist() == [4, 0, 4, 0]
    state = tiny.run(e, weights, state, jnp.int32(50), rows, no, jnp.int32(3))
    assert int(state.idle) == 7
    drafting = dataclasses.replace(state, draft_length=Told(jnp.int32(17), jnp.int32(0)))
    state = tiny.run(e, weights, drafting, jnp.int32(50), rows, no, jnp.int32(3))
    assert state.slots.drafted.tolist() == [0] * 4 and state.slots.drafted_total.tolist() == [4, 0, 4, 0]
    assert int(state.idle) == 3
    # Without patience a run knows no other end than before.
    state = tiny.run(e, weights, begun(e, told=20), jnp.int32(9), rows)
    assert int(state.work[0]) == 10


def test_drafts_of_a_request_that_the_host_ended_hold_nobody_up() -> None:
    """They are seen by no policy, are no reason to go on drafting, and a pause may begin; others' drafts forbid it."""
    e = engine(Phases(phase=1000))
    weights, rows = tiny.params_of(e), jnp.int32(4)
    state = tiny.run(e, weights, begun(e, told=0), jnp.int32(1), rows)
    assert state.slots.drafted.tolist() == [1, 0, 1, 0]
    state = dataclasses.replace(state, draft_length=Told(jnp.int32(1000), jnp.int32(0)))
    held = rest(e, weights, state, jnp.int32(9), rows)
    assert held.slots.emitted.tolist() == [1, 0, 1, 0] and int(held.idle) == 0
    ended = dataclasses.replace(held.slots, active=jnp.asarray([False, False, True, False]))
    state = dataclasses.replace(held, slots=ended)
    assert step.view_of(e, state).drafted.tolist() == [0, 0, 1, 0]
    state = tiny.run(e, weights, state, jnp.int32(4), rows)
    assert state.slots.drafted.tolist() == [1, 0, 0, 0] and int(state.idle) == 4
    emitted = int(state.slots.emitted[2])
    state = rest(e, weights, state, jnp.int32(3), rows)
    assert state.slots.emitted.tolist() == [1, 0, emitted + 3, 0]


def test_which_methods_pause() -> None:
    assert {name for name, m in METHODS.items() if getattr(m.draft_length, "pauses", False)} == {"aspire", "adaptive"}
    assert engine().pauses and engine(AspireDraftLength()).pauses and engine(AdaptiveDraftLength()).pauses
    assert not engine(FixedDraftLength()).pauses and not tiny.make(MODEL).pauses
    assert not engine(RecordDraftLength(positions=4)).pauses


def test_steps_are_counted_by_the_shapes_that_would_hold_them() -> None:
    for e in ENGINES.values():
        own, plain = e.shapes.all, pause.plain(e).shapes.all
        for p, i in zip(plain, pause._held_by(e), strict=True):
            assert own[i].kind == p.kind and own[i].tokens >= p.tokens
    assert [e.shapes.all[i].tokens for e in [engine()] for i in pause._held_by(e)] == [4, 4]


@pytest.mark.parametrize("method", ["adaptive", Method(RefreshContext(k_min=3, recent=1, rho=0.1), Phases(phase=30))])
def test_the_host_pauses_and_goes_on(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts than slots, so that slots are refilled in pauses and outside; the answers are AutoRegressive's."""
    model = Model(MODEL, tiny.unstacked(MODEL), None)
    requests = [aspire_jax.Request(token_ids=p, ignore_eos=True, max_tokens=20 + i) for i, p in enumerate(PROMPTS)]
    plain = aspire_jax.generate(model, requests, method="autoregressive", slots=2)
    steps: list[tuple[bool, int]] = []  # of each call, and whether it was a pause

    def spied(*args: Any) -> programs.Programs:
        made = programs.compiled(*args)

        def spy(run: Any, pauses: bool) -> Any:
            def call(*args: Any) -> Any:
                before = int(np.asarray(args[1].shape_steps).sum())
                state = run(*args)
                if int(args[4]) < 0:  # no rehearsal
                    steps.append((pauses, int(np.asarray(state.shape_steps).sum()) - before))
                return state

            return call

        return dataclasses.replace(made, run=spy(made.run, False), pause=spy(made.pause, True))

    monkeypatch.setattr(host, "compiled", spied)
    served = aspire_jax.stream(model, requests, method=method, slots=2, options={"d_max": 2})
    done = served.collect()
    for a, b in zip(done, plain, strict=True):
        assert len(a.token_ids) == len(b.token_ids) == 20 + a.index
        same = [x == y for x, y in zip(a.token_ids, b.token_ids, strict=True)]
        assert all(same) or b.margins[same.index(False)] < tiny.TIE
    assert sum(n for _, n in steps) == served.report.steps
    assert sum(n for pauses, n in steps if pauses) > 0 < sum(n for pauses, n in steps if not pauses)
    # Whatever ends a pause, the host asks until it takes no step; and it begins after steps without a draft.
    for (pauses, n), (after, _) in itertools.pairwise(steps):
        assert not pauses or after == (n > 0)
