"""The loop of the simulator: a policy of the library decides, recorded acceptances answer, time is added up.

Only the model is missing: `step.decide` makes the decision as in a real step, and the policy is told the same outcome.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.costs import TERMS, CostModel
from aspire_jax.draft_length import DraftLengthPolicy, Outcome, Signals, View
from aspire_jax.step import decide
from bench.simulation.acceptance import Acceptance


class Scene(NamedTuple):
    """A batch to simulate.

    Attributes:
      traces: what is accepted.
      batch: rows.
      truth: coefficients [4] by which time passes.
      believed: those that the policy plans with.
      share, least: the part of the context that a draft reads, and the tokens it reads at least.
    """

    traces: Acceptance
    batch: int
    truth: np.ndarray
    believed: np.ndarray
    share: float = 0.07
    least: float = 512.0


class Result(NamedTuple):
    """What a simulated run came to.

    Attributes:
      tokens_per_second: of the whole batch.
      per_verification: tokens emitted per verification.
      acceptance: accepted share of the drafts that were verified.
      drafts: drafts per verification.
      step_seconds: mean time of a step.
    """

    tokens_per_second: float
    per_verification: float
    acceptance: float
    drafts: float
    step_seconds: float


class Carry(NamedTuple):
    """A run under way.

    Attributes:
      request, position, drafted: [B] the request a row serves, tokens it has emitted, drafts it holds.
      idle: scalar, steps since a row last drafted or held a draft.
      policy: the policy's state.
      totals: [4] tokens, verifications, drafts verified, drafts accepted; seconds: scalar; work: [4].
    """

    request: jax.Array
    position: jax.Array
    drafted: jax.Array
    idle: jax.Array
    policy: Any
    totals: jax.Array
    seconds: jax.Array
    work: jax.Array


def replay(
    policy: DraftLengthPolicy, scenes: Sequence[Scene], *, mixed: bool, shapes: Any, steps: int = 4000
) -> list[Result]:
    """Runs `steps` steps of every scene; a row whose request is used up goes on with another one.

    All scenes run in one program, padded to the largest batch, so their traces must be of one shape.

    Args:
      mixed: as for `step.decide`.
      shapes: the step shapes, hashable (`shapes.Shapes` or `machine.ExactShapes`).
    """
    if not 0 < policy.d_max <= min(s.traces.d_max for s in scenes):
        raise ValueError(f"d_max: {policy.d_max}, expected 1 to the traces' {scenes[0].traces.d_max}")
    rows = max(s.batch for s in scenes)
    stacked = jax.tree.map(lambda *x: np.stack(x), *(arrays(s, rows) for s in scenes))
    done = _all(policy, mixed, shapes, steps, stacked)
    return [result(jax.tree.map(lambda x, i=i: x[i], done), steps) for i in range(len(scenes))]


class Arrays(NamedTuple):
    """A scene as the program takes it: `active` [B] bool in place of the batch, budget [2]."""

    traces: Acceptance
    active: np.ndarray
    truth: np.ndarray
    believed: np.ndarray
    budget: np.ndarray


def arrays(scene: Scene, rows: int) -> Arrays:
    """The scene, padded to `rows` rows."""
    truth, believed = (np.asarray(x, np.float32) for x in (scene.truth, scene.believed))
    budget = np.asarray([scene.share, scene.least], np.float32)
    return Arrays(scene.traces, np.arange(rows) < scene.batch, truth, believed, budget)


def result(done: Carry, steps: int) -> Result:
    """What a run of `steps` steps came to."""
    tokens, verifications, drafts, accepted = np.asarray(done.totals, np.float64)
    return Result(
        tokens_per_second=float(tokens / done.seconds),
        per_verification=tokens / verifications,
        acceptance=accepted / drafts if drafts else 0.0,
        drafts=drafts / verifications,
        step_seconds=float(done.seconds) / steps,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _all(policy: DraftLengthPolicy, mixed: bool, shapes: Any, steps: int, scenes: Arrays) -> Carry:
    def one(scene: Arrays) -> Carry:
        return advance(policy, mixed, shapes, steps, scene, begin(policy, scene))

    return jax.vmap(one)(scenes)


def begin(policy: DraftLengthPolicy, scene: Arrays) -> Carry:
    """A batch about to start. Rows begin at different places, as in one that has been running for a while."""
    requests, positions = scene.traces.run.shape
    batch = scene.active.shape[0]
    rows = jnp.arange(batch, dtype=jnp.int32)
    return Carry(
        request=rows % requests,
        position=(rows * 37) % positions,
        drafted=jnp.zeros((batch,), jnp.int32),
        idle=jnp.zeros((), jnp.int32),
        policy=policy.init(batch),
        totals=jnp.zeros((4,), jnp.float32),
        seconds=jnp.zeros((), jnp.float32),
        work=jnp.zeros((TERMS,), jnp.float32),
    )


def advance(policy: DraftLengthPolicy, mixed: bool, shapes: Any, steps: int, scene: Arrays, carry: Carry) -> Carry:
    """`steps` more steps."""
    traces, active = scene.traces, jnp.asarray(scene.active)
    requests, positions = traces.run.shape
    run_of, margin_of, start = (jnp.asarray(x) for x in traces)
    batch = active.shape[0]
    actual, cost = CostModel(jnp.asarray(scene.truth)), CostModel(jnp.asarray(scene.believed))
    share, least = jnp.asarray(scene.budget)
    nan = jnp.full((batch,), np.nan, jnp.float32)

    def step(carry: Carry, _: None) -> tuple[Carry, None]:
        length = start[carry.request] + carry.position
        selected = jnp.minimum(jnp.maximum(share * length.astype(jnp.float32), least), length.astype(jnp.float32))
        limit = jnp.full((batch,), policy.d_max, jnp.int32)
        view = View(active, carry.drafted, limit, length, selected, carry.idle, cost, shapes)
        drafting, queries = decide(policy, mixed, carry.policy, view)
        verified = (queries > 0) & ~drafting
        drafts = jnp.where(verified, carry.drafted, 0)
        accepted = jnp.minimum(run_of[carry.request, carry.position], drafts)
        emitted = jnp.where(verified, accepted + 1, 0)
        margin = margin_of[carry.request, carry.position, jnp.minimum(carry.drafted, traces.d_max - 1)]
        work = shapes.forecast(drafting, queries, length, selected)
        starts = jnp.any(drafting & (carry.drafted == 0))
        work = work + jnp.where(starts, shapes.copy(selected), 0.0)
        plain = shapes.forecast(jnp.zeros_like(active), active.astype(jnp.int32), length, selected)
        outcome = Outcome(
            verified=verified,
            drafts=drafts,
            accepted=accepted,
            emitted=emitted,
            drafted=drafting,
            token=jnp.where(drafting, 0, -1).astype(jnp.int32),
            signals=Signals(nan, jnp.where(drafting, margin, np.float32(np.nan)), nan, nan),
            seconds=cost.seconds(work),
            plain_seconds=cost.seconds(plain),
            active=active,
        )
        position = carry.position + emitted
        ended = position >= positions
        counts = (emitted, verified, drafts, accepted)
        held = jnp.where(drafting, carry.drafted + 1, jnp.where(verified, 0, carry.drafted))
        return Carry(
            request=jnp.where(ended, (carry.request + batch) % requests, carry.request),
            position=jnp.where(ended, 0, position),
            drafted=held,
            idle=jnp.where(jnp.any(drafting | (held > 0)), 0, carry.idle + 1),
            policy=policy.forget(policy.update(carry.policy, outcome), ended),
            totals=carry.totals + jnp.stack([jnp.sum(x).astype(jnp.float32) for x in counts]),
            seconds=carry.seconds + actual.seconds(work),
            work=carry.work + work,
        ), None

    return jax.lax.scan(step, carry, None, length=steps)[0]
