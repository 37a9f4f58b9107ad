"""Times of single steps: plain, all rows drafting, all rows verifying q tokens; and the loop's own overhead.

The cache's contents do not matter for time, so slots start at a given length over an empty cache.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import engine as engine_lib
from aspire_jax import methods, model, prefill, step
from aspire_jax.context import NoContext, RefreshContext
from aspire_jax.costs import TERMS, CostModel
from aspire_jax.draft_length import Outcome, View, in_step
from aspire_jax.engine import Engine, State
from aspire_jax.forward import forward, pack
from aspire_jax.loading import Model
from aspire_jax.shapes import Shape

_EMPTY_CALLS = 8


@flax.struct.dataclass
class Target:
    """Drafts to make before the next verification, scalar; the host sets it between runs."""

    gamma: jax.Array


@dataclasses.dataclass(frozen=True)
class OnDemand:
    """All rows in step, drafting as many tokens as the state says."""

    d_max: int

    def init(self, batch: int) -> Target:
        return Target(jnp.zeros((), jnp.int32))

    def decide(self, state: Target, view: View) -> jax.Array:
        wants = view.active & (view.drafted < jnp.minimum(state.gamma, view.limit))
        return in_step(wants)

    def update(self, state: Target, outcome: Outcome) -> Target:
        return state

    def forget(self, state: Target, rows: jax.Array) -> Target:
        return state


_init = jax.jit(engine_lib.init, static_argnums=0)
_admit = jax.jit(prefill.admit, static_argnums=0, donate_argnums=1)
_run = jax.jit(step.run, static_argnums=0, donate_argnums=2)


def start(engine: Engine, params: Any, length: int) -> State:
    """A state whose slots all go on from `length` tokens, placed where the params are."""
    state = _init(engine, CostModel(jnp.ones((TERMS,), jnp.float32)))
    state = jax.device_put(state, jax.tree.leaves(params)[0].sharding)
    never = np.full((engine.max_stop,), -1, np.int32)
    for slot in range(engine.batch):
        state = _admit(engine, state, np.int32(slot), np.int32(length), np.int32(1), np.int32(engine.max_new), never)
    return state


def measure(loaded: Model, batch: int, context: int, queries: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Median seconds of each kind of step, interleaved over `rounds`.

    Returns:
      plain; draft (first of a row's drafts apart: it selects and copies pages); verify: {q: seconds}; forward: a plain
      step's forward alone, without decide, resolve, write and loop; spread: quartiles of plain.
    """
    d_max = max(queries) - 1
    room = 512
    method = methods.Method(RefreshContext(), OnDemand(d_max))
    engine = methods.configure(loaded.config, method, batch=batch, capacity=context + room, max_new=room)
    plain_method = methods.Method(NoContext(), OnDemand(0))
    plain_engine = dataclasses.replace(engine, context=plain_method.context, draft_length=plain_method.draft_length)
    state = start(engine, loaded.params, context)
    samples: dict[str, list[float]] = {"plain": [], "first draft": [], "draft": [], "forward": []}
    samples |= {f"verify {q}": [] for q in queries}

    def call(engine: Engine, state: State, steps: int) -> tuple[State, float]:
        begin = time.perf_counter()
        state = _run(engine, loaded.params, state, np.int32(steps), np.int32(engine.batch))
        jax.block_until_ready(state.work)
        return state, time.perf_counter() - begin

    # What a call itself costs belongs to no step: the quickest of some that do nothing, as one alone may take longer
    # than a small model's steps where other work is in its way.
    around = dict.fromkeys((engine, plain_engine), float("inf"))

    def warm(engine: Engine, state: State) -> State:
        state, _ = call(engine, state, 2)
        for _ in range(_EMPTY_CALLS):
            state, seconds = call(engine, state, 0)
            around[engine] = min(around[engine], seconds)
        return state

    def timed(key: str, engine: Engine, state: State, steps: int) -> State:
        state, seconds = call(engine, state, steps)
        if steps:
            samples[key].append((seconds - around[engine]) / steps)
        return state

    state = warm(engine, state)
    plain = warm(plain_engine, start(plain_engine, loaded.params, context))
    alone = jax.jit(_forward_alone, static_argnums=0)
    jax.block_until_ready(alone(plain_engine, loaded.params, plain))
    for turn in range(rounds + 1):
        if turn == 1:  # what is built at a shape's first run is no part of its time
            for values in samples.values():
                values.clear()
        plain = timed("plain", plain_engine, plain, 4)
        begin = time.perf_counter()
        for _ in range(4):
            jax.block_until_ready(alone(plain_engine, loaded.params, plain))
        samples["forward"].append((time.perf_counter() - begin) / 4)
        for q in queries:
            state = dataclasses.replace(
                state, draft_length=Target(jax.device_put(np.int32(q - 1), state.work.sharding))
            )
            if q > 1:
                state = timed("first draft", engine, state, 1)
                state = timed("draft", engine, state, q - 2)
            # A chain of one-token verifications is plain decoding, and a plain step in the middle of one its like.
            state = timed(f"verify {q}", engine, state, 1 if q > 1 else 4)
    median = {key: statistics.median(values) for key, values in samples.items() if values}
    quartiles = [float(x) for x in np.percentile(samples["plain"], [25, 75])]
    return {
        "plain": median["plain"],
        "first_draft": median["first draft"],
        "draft": median["draft"],
        "verify": {q: median[f"verify {q}"] for q in queries},
        "forward": median["forward"],
        "plain_quartiles": quartiles,
        "rounds": rounds,
    }


def _forward_alone(engine: Engine, params: Any, state: State) -> tuple[jax.Array, Any]:
    """A plain step's forward and its tokens, as a program without a loop around it."""
    shape = Shape("dense", engine.batch, 1)
    none, one = jnp.zeros((engine.batch,), bool), jnp.ones((engine.batch,), jnp.int32)
    out = forward(engine, params, state, pack(engine, state, none, one, shape), shape)
    return jnp.argmax(model.unembed(engine.config, params, out.x), axis=-1), (out.k, out.v)


def ceiling(times: dict[str, Any], acceptance: list[float]) -> tuple[float, int]:
    """Best speedup that these step times allow, and its draft length.

    `acceptance[j]` is the probability that draft j is accepted where all before it were; the last one goes on.
    """
    best = (1.0, 0)
    for q, verify in times["verify"].items():
        drafts = q - 1
        if not drafts:
            continue
        reach, tokens = 1.0, 1.0
        for j in range(drafts):
            reach *= acceptance[min(j, len(acceptance) - 1)]
            tokens += reach
        cycle = times["first_draft"] + (drafts - 1) * times["draft"] + verify
        best = max(best, (tokens * times["plain"] / cycle, drafts))
    return best
