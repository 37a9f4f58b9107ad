"""Whole runs of a method with acceptances that are forced: the paper's, drawn as the simulator draws them.

With `gpu_steps.weights` the target's token is always 0. Before each step the drafts a row holds are overwritten: zeros
as far as the drawn trace accepts, ones behind. The engine then does all it ever does, and accepts just that many.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import step
from aspire_jax.costs import CostModel
from aspire_jax.engine import Engine, State
from bench import gpu_steps
from bench.gpu_sizes import Sizes
from bench.simulation import machine, paper

WORKLOAD = "LB-v2[30k-40k]"
# The table's names, by the library's.
TABLE = {"autoregressive": "AutoRegressive", **paper.SYNCHRONISED, **paper.MIXED}


def runs_of(name: str, batch: int, new: int) -> np.ndarray:
    """[B, new]: how many drafts from each position on would be accepted, in the model's runs of the workload."""
    cell = paper.Cell(name, WORKLOAD)
    run = paper.mixed(cell, paper.spread(cell), seed=0).traces.run
    return np.resize(run, (batch, run.shape[1]))[:, np.arange(new) % run.shape[1]].astype(np.int32)


def replay(engine: Engine, params: Any, state: State, steps: jax.Array, accepts: jax.Array) -> State:
    """`steps` steps, or until no row is active; accepts: [B, max_new] as `runs_of`."""
    rows = jnp.arange(engine.batch, dtype=jnp.int32)

    def forced(state: State) -> State:
        s = state.slots
        most = accepts[rows, jnp.minimum(s.emitted, accepts.shape[1] - 1)]
        place = jnp.arange(engine.d_max, dtype=jnp.int32)[None]
        drafts = jnp.where(place < most[:, None], 0, 1).astype(jnp.int32)
        return dataclasses.replace(state, slots=dataclasses.replace(s, drafts=drafts))

    def goes_on(carry: tuple[jax.Array, State]) -> jax.Array:
        return (carry[0] < steps) & jnp.any(carry[1].slots.active)

    def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        return carry[0] + 1, step.step(engine, params, forced(carry[1]))

    return jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))[1]


def measure(sizes: Sizes, name: str, held: gpu_steps.Held, method: str, steps: dict[str, Any] | None) -> dict[str, Any]:
    """Tokens a second of the whole batch, and how they came about."""
    engine, weights = gpu_steps.configured(sizes, name, method), held.params
    state = gpu_steps.started(engine, sizes.context)
    if steps is not None:
        coefficients = jnp.maximum(jnp.asarray(steps["fit"]["coefficients"], jnp.float32), 0)
        state = dataclasses.replace(state, cost=CostModel(coefficients))
    accepts = jnp.asarray(runs_of(name, engine.batch, sizes.new))
    most = np.int32(sizes.steps)
    began = time.perf_counter()
    run = gpu_steps.compiled(engine, replay, weights, state, most, accepts)
    compiling = time.perf_counter() - began
    state = run(weights, state, np.int32(2), accepts)  # the first step of a request verifies; memory is found
    before = np.asarray(state.slots.emitted).sum()
    jax.block_until_ready(state.work)
    began = time.perf_counter()
    state = run(weights, state, most, accepts)
    jax.block_until_ready(state.work)
    seconds = time.perf_counter() - began
    s = jax.device_get(state.slots)
    emitted = int(s.emitted.sum() - before)
    drafted, verifications = int(s.drafted_total.sum()), int(s.verifications.sum())
    found = {
        "tokens_per_second": emitted / seconds,
        "tokens_per_verification": int(s.emitted.sum()) / max(verifications, 1),
        "acceptance": int(s.accepted_total.sum()) / max(drafted, 1),
        "steps": int(s.steps.max()),
        "seconds": seconds,
        "compile_seconds": compiling,
    }
    if method in TABLE:
        column = machine.WORKLOADS.index(WORKLOAD)
        found["paper_tokens_per_second"] = machine.tables()["throughput_tok_s"][name][TABLE[method]][column]
        if method != "autoregressive":
            found["paper_speedup"] = machine.tables()["speedup"][name][TABLE[method]][column]
    return found
