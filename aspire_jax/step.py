"""The step: decide which rows verify, run the mixed forward, resolve what it says. And the loop around it.

    decide    each row drafts one token, verifies its drafts, or waits; the step takes the cheapest shape that fits
    forward   all rows' tokens through one forward (forward.py)
    resolve   drafting rows keep their token; verifying rows commit the accepted prefix and one token of the target

Source: ASPIRE, arXiv 2609.17943, section 3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import cache as kv
from aspire_jax import instrument, reproducible, signals
from aspire_jax.attention import pallas
from aspire_jax.draft_length import DRAFT, IDLE, VERIFY, DraftLengthPolicy, Outcome, Signals, View
from aspire_jax.engine import Engine, Slots, State
from aspire_jax.forward import Batch, Forward, forward, pack
from aspire_jax.params import Params
from aspire_jax.resolve import resolve
from aspire_jax.sampling import draw
from aspire_jax.sampling.rows import Sampling
from aspire_jax.shapes import Shape


def step(engine: Engine, params: Params, state: State, rehearsed: jax.Array | int = -1) -> State:
    """One step of every active row.

    Args:
      rehearsed: scalar int32, index of the shape to rehearse, as in `run`; -1: none.
    """
    view = _view(engine, state)
    drafting, queries = decide(engine.draft_length, engine.mixed, state.draft_length, view)
    shapes = engine.shapes
    index = shapes.choose(drafting, queries, view.lengths)
    rehearses = jnp.asarray(rehearsed >= 0)
    index, drafting, queries = _rehearsal(engine, rehearsed, index, drafting, queries)
    copied = jnp.any(state.slots.stale & drafting) & engine.copies
    work = shapes.work(index, drafting, queries, view.lengths, view.selected, copied)
    plain = shapes.forecast(jnp.zeros_like(drafting), view.active.astype(jnp.int32), view.lengths, view.selected)
    if engine.d_max and engine.copies:
        state = _renew(engine, state, drafting)
    # The branches read the cache and return what is to be written: a buffer that a branch updates itself is copied.
    branches = [functools.partial(_in_shape, engine, shape) for shape in shapes.all]
    operands = (params, state, drafting, queries)
    if len(branches) > 1:
        done = jax.lax.switch(index, branches, *operands)
    else:  # Nothing would be left of a switch of one branch, and a cache that is read outside any branch is copied.
        idle = functools.partial(_no_step, branches[0])
        done = jax.lax.cond(jnp.any(queries > 0), branches[0], idle, *operands)
    done = done._replace(page=jnp.where(rehearses, _nowhere(engine), done.page))
    verified = (queries > 0) & ~drafting
    sampling, drawn = _draw(engine, state, done, drafting)
    commit = resolve(engine, state.slots, drafting, verified, done.first, drawn.token, drawn.margin)
    if sampling is not None:
        sampling = draw.record(sampling, drawn, commit.packed, commit.place, commit.tokens, commit.emitted)
    if done.scores is not None:
        context = instrument.observe(engine, state, done.context, done.scores, commit.emitted, drafting)
        done = done._replace(context=context)
    after = _select(engine, _write(engine, state, done, drafting), commit.slots, drafting, verified)
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
        shape_steps=state.shape_steps.at[index].add(1),
    )


def run(
    engine: Engine,
    params: Params,
    state: State,
    max_steps: jax.Array,
    until_finished: jax.Array,
    rehearsed: jax.Array | int = -1,
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
    """
    at_start = jnp.sum(state.slots.active)

    def goes_on(carry: tuple[jax.Array, State]) -> jax.Array:
        done, s = carry
        active = jnp.sum(s.slots.active)
        acts = (active > 0) & (at_start - active <= until_finished)
        return (done < max_steps) & (acts | (rehearsed >= 0))

    def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        return carry[0] + 1, step(engine, params, carry[1], rehearsed)

    return jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))[1]


def _rehearsal(engine: Engine, rehearsed: jax.Array | int, *step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Shape, drafting rows and query tokens of a `step`; of one that rehearses where `rehearsed` names a shape."""
    drafts = jnp.asarray([shape.kind == "draft" for shape in engine.shapes.all])[jnp.maximum(rehearsed, 0)]
    rows = (engine.batch,)
    instead = (jnp.int32(rehearsed), jnp.broadcast_to(drafts, rows), jnp.ones(rows, jnp.int32))
    index, drafting, queries = (jnp.where(rehearsed >= 0, a, b) for a, b in zip(instead, step, strict=True))
    return index, drafting, queries


def _view(engine: Engine, state: State) -> View:
    s = state.slots
    left = jnp.minimum(s.max_new - s.emitted - 1, engine.capacity - s.length - 1)
    limit = jnp.where(s.fresh, 0, jnp.clip(left, 0, engine.d_max))
    pages = jnp.sum(state.selection >= 0, axis=-1).astype(jnp.float32)  # [n_sets, B], or of each KV head
    selected = jnp.mean(pages, axis=(0, *range(2, pages.ndim)))  # [B] pages
    selected = jnp.minimum(selected * np.float32(engine.page_size), s.length.astype(jnp.float32))
    return View(s.active, s.drafted, limit, s.length, selected, state.cost, engine.shapes)


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


class _Done(NamedTuple):
    """What a step in one shape produced; the same form for all shapes.

    Attributes:
      k, v: new keys and values, per layer [T_max, Hkv, D].
      page, offset: [T_max] where they go in the cache; out of range for padding and drafts.
      width: scalar, tokens before the padding that makes all shapes alike; 0 where nothing goes into the cache.
      first: [B] index of each row's first token.
      target, margin: [T_max] the greedy token after each packed token, and how far its logit lay above the second best
        (0 in a step of drafts alone).
      packed: what the tokens are drawn from where the engine samples; tokens: scalar, packed tokens before the padding.
      context: the context policy's state, with the step's page scores unless `scores` has them.
      signals, recall: see `Outcome`.
      scores: where the engine is instrumented, mass and rows of `Scores` of all measured layers, every query's apart.
    """

    k: kv.Leaves
    v: kv.Leaves
    page: jax.Array
    offset: jax.Array
    width: jax.Array
    first: jax.Array
    target: jax.Array
    margin: jax.Array
    packed: draw.Packed | None
    tokens: jax.Array
    context: Any
    signals: Signals
    recall: jax.Array | None
    scores: tuple[jax.Array, jax.Array] | None


def _in_shape(
    engine: Engine, shape: Shape, params: Params, state: State, drafting: jax.Array, queries: jax.Array
) -> _Done:
    """The step in one static shape: all that depends on it, so that the rest is compiled once."""
    batch = pack(engine, state, drafting, queries, shape)
    out = forward(engine, params, state, batch, shape)
    logits = engine.tokenwise(jnp.sum(queries)).unembed(params, out.x)  # [T, V]
    target = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    top = jnp.max(logits, axis=-1)
    page, offset = _destination(engine, state.slots, batch)
    known = signals.unknown(engine.batch)
    if shape.kind != "dense" and engine.d_max and engine.signals:
        known = signals.measure(engine.signals, logits[batch.first], target[batch.first], out.outside, drafting)
    margin = jnp.zeros_like(top)
    if shape.kind != "draft":
        is_top = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == target[:, None]
        margin = top - jnp.max(jnp.where(is_top, -jnp.inf, logits), axis=-1)
    context, recall, scores = out.context, None, None
    if engine.instrumented:
        recall = jnp.full((engine.batch, engine.d_max), np.nan, jnp.float32) if out.recall is None else out.recall
        scores = instrument.every_query(engine, out.scores)
    else:
        context = _observe(engine, batch, out, shape)
    widest = max(s.tokens for s in engine.shapes.all)

    def pad(x: jax.Array, axis: int, fill: int = 0) -> jax.Array:
        around = [(0, 0)] * x.ndim
        around[axis] = (0, widest - shape.tokens)
        return jnp.pad(x, around, constant_values=x.dtype.type(fill))

    k, v = (jax.tree.map(lambda x: pad(x, 0 if engine.unrolled else 1), leaves) for leaves in (out.k, out.v))
    page, offset = pad(page, 0, _nowhere(engine)), pad(offset, 0)
    width = jnp.int32(0 if shape.kind == "draft" else shape.tokens)
    target, margin = pad(target, 0), pad(margin, 0)
    packed = None
    if engine.sampling is not None:
        place = jnp.where(drafting[batch.row], state.slots.drafted[batch.row], batch.query)
        packed = draw.Packed(*(pad(x, 0) for x in (logits, batch.row, place, batch.valid)))
    tokens = jnp.int32(shape.tokens)
    written = (k, v, page, offset, width, batch.first)
    return _Done(*written, target, margin, packed, tokens, context, known, recall, scores)


def _no_step(step: Callable[..., _Done], *args: Any) -> _Done:
    """A step in which no row acts."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, *args))


def _draw(engine: Engine, state: State, done: _Done, drafting: jax.Array) -> tuple[Sampling | None, draw.Drawn]:
    """The token after each packed token: the greedy one, or drawn where a row wants more than that."""
    if engine.sampling is None or state.sampling is None or done.packed is None:
        none = jnp.zeros((0,), jnp.float32)
        return None, draw.Drawn(done.target, done.margin, none, none, none)
    s = state.slots
    rows = draw.Rows(drafting, s.drafts, s.drafted, s.length, s.emitted, s.stop)
    chunks = (done.tokens + engine.batch - 1) // engine.batch
    return draw.draw(engine.sampling, state.sampling, done.packed, rows, chunks, done.target, done.margin)


def _renew(engine: Engine, state: State, drafting: jax.Array) -> State:
    """Copies the selected pages afresh where a row is about to draft from an outdated copy."""
    stale = state.slots.stale & drafting

    def gather(state: State) -> kv.KVCache:
        def one(leaves: kv.Leaves, old: kv.Leaves, layer: int) -> jax.Array:
            at = layer if engine.unrolled else jnp.int32(layer)
            if not engine.plan.reads_copy(layer):
                return kv.leaf(old, at)
            return kv.selected_view(kv.leaf(leaves, at), state.slots.table, state.selection[engine.plan.sets[layer]])

        def all_layers(leaves: kv.Leaves, old: kv.Leaves) -> kv.Leaves:
            copies = [one(leaves, old, layer) for layer in range(engine.config.n_layers)]
            return tuple(copies) if engine.unrolled else jnp.stack(copies)

        cache, old = state.cache, state.compact
        return kv.KVCache(all_layers(cache.k, old.k), all_layers(cache.v, old.v))

    compact = jax.lax.cond(jnp.any(stale), gather, lambda s: s.compact, state)
    # The copy was made for every row, from each row's current selection and cache: none is outdated now.
    fresh_copy = jnp.where(jnp.any(stale), False, state.slots.stale)
    return dataclasses.replace(state, compact=compact, slots=dataclasses.replace(state.slots, stale=fresh_copy))


def _destination(engine: Engine, slots: Slots, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Page and offset [T] of each verified token in the cache; a page out of range for padding and drafts."""
    page = slots.table[batch.row, jnp.minimum(batch.position // engine.page_size, engine.pages - 1)]
    verified = batch.valid & ~batch.drafting[batch.row]
    return jnp.where(verified, page, _nowhere(engine)), batch.position % engine.page_size


def _nowhere(engine: Engine) -> int:
    """A page that no cache has: what is written to it is dropped."""
    return engine.batch * engine.pages


def _write(engine: Engine, state: State, done: _Done, drafting: jax.Array) -> State:
    """Verified tokens' keys and values go into the cache, a drafted token's into its row's tail."""
    if engine.implementation == "pallas":
        new = (done.k, done.v)
        cache = kv.KVCache(*pallas.write(engine, state.cache.k, state.cache.v, new, done.page, done.offset))
        return dataclasses.replace(
            state, cache=cache, tail=_in_tail(engine, state, done, drafting), context=done.context
        )
    chunk, axis = reproducible.WIDTH if engine.reproducible else engine.batch, 0 if engine.unrolled else 1

    def put(i: jax.Array, cache: kv.KVCache) -> kv.KVCache:
        def part(x: jax.Array, axis: int = 0) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis)

        k, v = (jax.tree.map(lambda x: part(x, axis), new) for new in (done.k, done.v))
        page, offset = part(done.page), part(done.offset)
        return kv.KVCache(k=kv.write(cache.k, k, page, offset), v=kv.write(cache.v, v, page, offset))

    # By chunks, so that a narrow step does not pay for the widest one's padding.
    cache = jax.lax.fori_loop(0, done.width // chunk, put, state.cache)
    return dataclasses.replace(state, cache=cache, tail=_in_tail(engine, state, done, drafting), context=done.context)


def _in_tail(engine: Engine, state: State, done: _Done, drafting: jax.Array) -> kv.Tail:
    """The tail with each drafted token's keys and values in it."""
    tail, axis = state.tail, 0 if engine.unrolled else 1
    if not engine.d_max:
        return tail
    row = jnp.arange(engine.batch, dtype=jnp.int32)
    slot = jnp.where(drafting, state.slots.drafted, engine.d_max)  # out of range: dropped
    k, v = (jax.tree.map(lambda x: jnp.take(x, done.first, axis=axis), new) for new in (done.k, done.v))
    if engine.implementation == "pallas":
        return kv.Tail(*pallas.write(engine, tail.k, tail.v, (k, v), row, slot))
    return kv.Tail(k=kv.write(tail.k, k, row, slot), v=kv.write(tail.v, v, row, slot))


def _observe(engine: Engine, batch: Batch, out: Forward, shape: Shape) -> Any:
    """Hands the step's page scores to the context policy; returns its state."""
    same_step = engine.plan.same_step
    if not engine.d_max or out.scores is None or (shape.kind == "draft" and same_step):
        return out.context
    # Where selections are served within the step, the forward has handed over the drafting rows' scores already.
    rows = out.scores.rows & ~batch.drafting[None] if same_step else out.scores.rows
    return engine.context.observe(out.context, out.scores._replace(rows=rows))


def _select(engine: Engine, state: State, slots: Slots, drafting: jax.Array, verified: jax.Array) -> State:
    """The state with `slots`, and with new selections where the plan renews them."""
    if not engine.d_max:
        return dataclasses.replace(state, slots=slots)
    renewed = drafting | verified if engine.plan.renew == "step" else verified

    def choose(_: jax.Array) -> jax.Array:
        chosen = engine.context.select(state.context, slots.length, engine.room)
        return jnp.where(renewed.reshape(1, -1, *(1,) * (chosen.ndim - 2)), chosen, state.selection)

    selection = jax.lax.cond(jnp.any(renewed), choose, lambda old: old, state.selection)
    slots = dataclasses.replace(slots, stale=slots.stale | renewed)
    return dataclasses.replace(state, slots=slots, selection=selection)
