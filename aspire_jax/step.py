"""The step: decide which rows verify, run the mixed forward, resolve what it says. And the loop around it.

    decide    each row drafts one token, verifies its drafts, or waits; the step takes the cheapest shape that fits
    forward   all rows' tokens through one forward (shaped.py, forward.py)
    resolve   drafting rows keep their token; verifying rows commit the accepted prefix and one token of the target
    upkeep    keys and values go where they belong, and rows about to draft get new selections (upkeep.py)

Source: ASPIRE, arXiv 2609.17943, section 3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import instrument
from aspire_jax.draft_length import DRAFT, IDLE, VERIFY, DraftLengthPolicy, Outcome, View
from aspire_jax.engine import Engine, Slots, State
from aspire_jax.params import Params
from aspire_jax.resolve import resolve
from aspire_jax.sampling import draw
from aspire_jax.sampling.rows import Sampling
from aspire_jax.shaped import Done, in_shape, no_step
from aspire_jax.upkeep import outdated, renew, write

# Patience without end.
NEVER = np.iinfo(np.int32).max


def step(engine: Engine, params: Params, state: State, rehearsed: jax.Array | int = -1) -> State:
    """One step of every active row.

    Args:
      rehearsed: scalar int32, index of the shape to rehearse, as in `run`; -1: none.
    """
    view = view_of(engine, state)
    drafting, queries = decide(engine.draft_length, engine.mixed, state.draft_length, view)
    shapes = engine.shapes
    index = shapes.choose(drafting, queries, view.lengths)
    rehearses = jnp.asarray(rehearsed >= 0)
    index, drafting, queries = _rehearsal(engine, rehearsed, index, drafting, queries)
    due = jnp.any(state.slots.stale & drafting)
    work = shapes.work(index, drafting, queries, view.lengths, view.selected, due & engine.copies)
    plain = shapes.forecast(jnp.zeros_like(drafting), view.active.astype(jnp.int32), view.lengths, view.selected)
    if engine.d_max:
        state = renew(engine, state, due)
    # The branches read the cache and return what is to be written: a buffer that a branch updates itself is copied.
    branches = [functools.partial(in_shape, engine, shape) for shape in shapes.all]
    operands = (params, state, drafting, queries)
    if len(branches) > 1:
        done = jax.lax.switch(index, branches, *operands)
    else:  # Nothing would be left of a switch of one branch, and a cache that is read outside any branch is copied.
        idle = functools.partial(no_step, branches[0])
        done = jax.lax.cond(jnp.any(queries > 0), branches[0], idle, *operands)
    done = done._replace(page=jnp.where(rehearses, engine.nowhere, done.page))
    verified = (queries > 0) & ~drafting
    sampling, drawn = _draw(engine, state, done, drafting)
    commit = resolve(engine, state.slots, drafting, verified, done.first, drawn.token, drawn.margin)
    if sampling is not None:
        sampling = draw.record(sampling, drawn, commit.packed, commit.place, commit.tokens, commit.emitted)
    if done.scores is not None:
        context = instrument.observe(engine, state, done.context, done.scores, commit.emitted, drafting)
        done = done._replace(context=context)
    after = outdated(engine, write(engine, state, done, drafting), commit.slots, drafting, verified)
    if engine.instrumented:
        after = dataclasses.replace(after, read=instrument.read(engine, state, after, drafting))
    outcome = Outcome(
        verified=verified,
        drafts=jnp.where(verified, state.slots.drafted, 0),
        accepted=commit.accepted,
        emitted=commit.emitted,
        drafted=drafting,
        token=jnp.where(drafting, drawn.token[done.first], -1),
        signals=done.signals,
        seconds=state.cost.seconds(work),
        plain_seconds=state.cost.seconds(plain),
        active=view.active,
        recall=done.recall,
    )
    return dataclasses.replace(
        after,
        sampling=sampling,
        draft_length=engine.draft_length.update(state.draft_length, outcome),
        work=state.work + work,
        idle=jnp.where(jnp.any(drafting | holding(commit.slots)), 0, state.idle + 1),
        shape_steps=state.shape_steps.at[index].add(1),
    )


def run(
    engine: Engine,
    params: Params,
    state: State,
    max_steps: jax.Array,
    until_finished: jax.Array,
    rehearsed: jax.Array | int = -1,
    patience: jax.Array | int = NEVER,
) -> State:
    """Steps until no row is active, `max_steps` are done, or more than `until_finished` rows have become inactive.

    Args:
      max_steps: scalar int32.
      until_finished: scalar int32; the loop ends once more rows than this have finished since it began, so that the
        host can refill their slots. `engine.batch` never ends it early.
      rehearsed: scalar int32, index of the shape (`engine.shapes.all`) to run `max_steps` steps in, every row acting as
        if it were active; -1: none. Of the state only the cache is as it was. XLA builds some of a CPU's kernels when
        they first run, at several times the time of the step itself; a rehearsal puts that before the first step that
        counts.
      patience: scalar int32; the loop ends, too, once in so many steps on end nobody drafted. `pause.run` can go on.
    """

    def goes_on(done: jax.Array, s: State) -> jax.Array:
        return jnp.minimum(done, s.idle) < patience

    return loop(engine, params, state, max_steps, until_finished, rehearsed, goes_on)


def loop(
    engine: Engine,
    params: Params,
    state: State,
    max_steps: jax.Array,
    until_finished: jax.Array,
    rehearsed: jax.Array | int,
    goes_on: Callable[[jax.Array, State], jax.Array],
) -> State:
    """`run` while it also `goes_on`, which is asked with the steps done and the state."""
    at_start = jnp.sum(state.slots.active)

    def acts(carry: tuple[jax.Array, State]) -> jax.Array:
        done, s = carry
        active = jnp.sum(s.slots.active)
        acts = (active > 0) & (at_start - active <= until_finished) & goes_on(done, s)
        return (done < max_steps) & (acts | (rehearsed >= 0))

    def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        return carry[0] + 1, step(engine, params, carry[1], rehearsed)

    return jax.lax.while_loop(acts, body, (jnp.int32(0), state))[1]


def decide(policy: DraftLengthPolicy, mixed: bool, policy_state: Any, view: View) -> tuple[jax.Array, jax.Array]:
    """Which rows draft [B] bool, and each row's query tokens [B]: 1, d + 1, or 0 where it waits.

    Args:
      mixed: whether rows may draft and verify in one step; if not, who would verify waits for those who draft.
    """
    action = policy.decide(policy_state, view)
    action = jnp.where((action == DRAFT) & (view.drafted >= view.limit), VERIFY, action)
    action = jnp.where(view.active, action, IDLE)
    drafting = action == DRAFT
    if not mixed:
        action = jnp.where((action == VERIFY) & jnp.any(drafting), IDLE, action)
    queries = jnp.where(drafting, 1, jnp.where(action == VERIFY, view.drafted + 1, 0))
    return drafting, queries.astype(jnp.int32)


def view_of(engine: Engine, state: State) -> View:
    """The batch as the draft-length policy sees it."""
    s = state.slots
    left = jnp.minimum(s.max_new - s.emitted - 1, engine.capacity - s.length - 1)
    limit = jnp.where(s.fresh, 0, jnp.clip(left, 0, engine.d_max))
    pages = jnp.sum(state.selection >= 0, axis=-1).astype(jnp.float32)  # [n_sets, B], or of each KV head
    selected = jnp.mean(pages, axis=(0, *range(2, pages.ndim)))  # [B] pages
    selected = jnp.minimum(selected * np.float32(engine.page_size), s.length.astype(jnp.float32))
    return View(
        s.active, jnp.where(holding(s), s.drafted, 0), limit, s.length, selected, state.idle, state.cost, engine.shapes
    )


def holding(slots: Slots) -> jax.Array:
    """[B] bool, rows that hold drafts; not those whose request the host ended meanwhile."""
    return slots.active & (slots.drafted > 0)


def _rehearsal(engine: Engine, rehearsed: jax.Array | int, *step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Shape, drafting rows and query tokens of a `step`; of one that rehearses where `rehearsed` names a shape."""
    drafts = jnp.asarray([shape.kind == "draft" for shape in engine.shapes.all])[jnp.maximum(rehearsed, 0)]
    rows = (engine.batch,)
    instead = (jnp.int32(rehearsed), jnp.broadcast_to(drafts, rows), jnp.ones(rows, jnp.int32))
    index, drafting, queries = (jnp.where(rehearsed >= 0, a, b) for a, b in zip(instead, step, strict=True))
    return index, drafting, queries


def _draw(engine: Engine, state: State, done: Done, drafting: jax.Array) -> tuple[Sampling | None, draw.Drawn]:
    """The token after each packed token: the greedy one, or drawn where a row wants more than that."""
    if engine.sampling is None or state.sampling is None or done.packed is None:
        none = jnp.zeros((0,), jnp.float32)
        return None, draw.Drawn(done.target, done.margin, none, none, none)
    s = state.slots
    rows = draw.Rows(drafting, s.drafts, s.drafted, s.length, s.emitted, s.stop)
    chunks = (done.tokens + engine.batch - 1) // engine.batch
    return draw.draw(engine.sampling, state.sampling, done.packed, rows, chunks, done.target, done.margin)
