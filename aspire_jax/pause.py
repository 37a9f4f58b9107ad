"""Phases in which nothing is drafted: plain decoding by a program of its own, until the policy wants to draft again.

A step that may draft measures page scores and carries all that drafting needs, at some percent of its time. One that
cannot is AutoRegressive's own, and so is its speed. What drafts and page scores there are is left as it is.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import engine as engine_lib
from aspire_jax.context import NoContext
from aspire_jax.draft_length import Paused
from aspire_jax.engine import Engine, State
from aspire_jax.params import Params
from aspire_jax.step import decide, holding, loop, view_of


def plain(engine: Engine) -> Engine:
    """The engine without drafts: AutoRegressive's, but for the policy that listens."""
    return dataclasses.replace(engine, context=NoContext(), draft_length=Paused(engine.draft_length), mixed=False)


def run(
    engine: Engine,
    params: Params,
    state: State,
    max_steps: jax.Array,
    until_finished: jax.Array,
    rehearsed: jax.Array | int = -1,
) -> State:
    """As `step.run`, without drafts and until the policy wants one; takes no step where a row holds drafts.

    Rows that took a step are marked as fresh, because nothing of it was measured: they verify once before they draft.
    The policy is asked as if they could draft at once, and the context policy sees no scores.

    Args:
      rehearsed: scalar int32, index of the shape to rehearse (`plain(engine).shapes.all`), as in `step.run`; -1: none.
    """

    def rests(_: jax.Array, s: State) -> jax.Array:
        """Whether the policy wants no draft of rows of which everything is known."""
        slots = dataclasses.replace(s.slots, drafts=state.slots.drafts, fresh=jnp.zeros_like(s.slots.fresh))
        view = view_of(engine, dataclasses.replace(state, slots=slots, idle=s.idle))
        drafting, _ = decide(engine.draft_length, engine.mixed, s.draft_length, view)
        return ~jnp.any(drafting | holding(s.slots))

    before = _without_drafts(plain(engine), state)
    after = _with_drafts_of(state, loop(plain(engine), params, before, max_steps, until_finished, rehearsed, rests))
    moved = after.slots.steps > state.slots.steps
    return dataclasses.replace(
        state,
        cache=after.cache,
        slots=dataclasses.replace(after.slots, fresh=after.slots.fresh | moved, stale=after.slots.stale | moved),
        sampling=after.sampling,
        draft_length=after.draft_length,
        work=after.work,
        idle=after.idle,
        shape_steps=state.shape_steps.at[_held_by(engine)].add(after.shape_steps),
    )


def _without_drafts(engine: Engine, state: State) -> State:
    """The state as `engine`, which has no drafts, has it."""
    empty = engine_lib.init(engine, state.cost)
    narrow = _with_drafts_of(empty, state)
    return dataclasses.replace(
        empty,
        cache=state.cache,
        slots=narrow.slots,
        sampling=narrow.sampling,
        draft_length=state.draft_length,
        work=state.work,
        idle=state.idle,
    )


def _with_drafts_of(other: State, state: State) -> State:
    """`state` with the drafts of `other`, and the distributions they were drawn from."""
    sampling = state.sampling
    if sampling is not None and other.sampling is not None:
        sampling = dataclasses.replace(sampling, proposals=other.sampling.proposals)
    slots = dataclasses.replace(state.slots, drafts=other.slots.drafts)
    return dataclasses.replace(state, slots=slots, sampling=sampling)


def _held_by(engine: Engine) -> np.ndarray:
    """For each shape of the engine without drafts, the index of the first of the engine's own that holds it."""
    own = list(enumerate(engine.shapes.all))
    return np.array(
        [next(i for i, s in own if s.kind == p.kind and s.tokens >= p.tokens) for p in plain(engine).shapes.all]
    )
