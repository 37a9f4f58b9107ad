"""Whole runs of a method with acceptances that are forced: the paper's, drawn as the simulator draws them.

With `gpu_steps.weights` the target's token is always 0. Before each step the drafts a row holds are overwritten: zeros
as far as the drawn trace accepts, ones behind. The engine then does all it ever does, and accepts just that many. The
oracle's plan is the trace itself. What `adaptive` reads from its drafts' confidence says nothing here: all logits are
equal, so it has only acceptances to go by.
"""

from __future__ import annotations

import dataclasses
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import costs, step
from aspire_jax.costs import CostModel
from aspire_jax.draft_length import OracleState
from aspire_jax.engine import Engine, State
from bench import gpu_plan, gpu_steps
from bench.gpu_sizes import Load, Sizes
from bench.simulation import machine, paper

# The table's names, by the library's; its MagicDec does not say which of the two selections it uses.
_SYNCHRONISED = {**paper.SYNCHRONISED, "magicdec-snapkv": "MagicDec"}
TABLE = {"autoregressive": "AutoRegressive", **_SYNCHRONISED, **paper.MIXED}
# A card of this many operations a second, where no step was timed to fit the cost model to.
_FLOPS = 4e14


def runs_of(name: str, workload: str, method: str, batch: int, new: int) -> np.ndarray:
    """[B, new]: how many drafts from each position on would be accepted, in the model's runs of the workload.

    The methods that mix rows, ours too, share ASPIRE's; the others have their own.
    """
    cell = paper.Cell(name, workload)
    if method in _SYNCHRONISED:
        run = paper.synchronised(cell, _SYNCHRONISED[method], seed=0).traces.run
    else:
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


class Ready(dict[str, "Future[tuple[Any, float]]"]):
    """Compiled replays by method, or what went wrong; each with the seconds it took beside the others."""


def prepare(sizes: Sizes, name: str, held: gpu_steps.Held, load: Load, methods: tuple[str, ...], ready: Ready) -> Any:
    """Compiles the replays of `methods` side by side: that is most of a first run's time, and runs on CPU cores."""

    def one(method: str) -> tuple[Any, float]:
        engine, began = gpu_steps.configured(sizes, name, method, load), time.perf_counter()
        accepts = jax.ShapeDtypeStruct((engine.batch, sizes.new), jnp.int32)
        return gpu_steps.compiled(engine, replay, held.params, np.int32(0), accepts), time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(max(1, min(len(methods), (os.cpu_count() or 2) // 2))) as pool:
        ready |= {method: pool.submit(one, method) for method in methods}
    return {"seconds": time.perf_counter() - began, "programs": len(methods)}


def begun(engine: Engine, load: Load, accepts: np.ndarray, coefficients: np.ndarray) -> State:
    """The state a replay starts from."""
    state = gpu_steps.started(engine, load.context)
    state = dataclasses.replace(state, cost=CostModel(jnp.asarray(coefficients, jnp.float32)))
    if isinstance(state.draft_length, OracleState):
        plan = jnp.asarray(np.minimum(accepts, engine.d_max))
        state = dataclasses.replace(state, draft_length=dataclasses.replace(state.draft_length, plan=plan))
    return state


def coefficients_of(sizes: Sizes, name: str, steps: dict[str, Any] | None, copy: float | None) -> np.ndarray:
    """The cost model to plan with: as fitted to single steps, or by the card's rates where none were timed."""
    if steps is not None:
        return np.maximum(np.asarray(steps["fit"]["coefficients"], np.float32), 0)
    return costs.roofline(sizes.models[name], gpu_plan.itemsize(sizes), (copy or 3000.0) * 1e9, _FLOPS)


def measure(
    sizes: Sizes,
    name: str,
    workload: str,
    load: Load,
    method: str,
    held: gpu_steps.Held,
    ready: Ready,
    coefficients: np.ndarray,
) -> dict[str, Any]:
    """Tokens a second of the whole batch, how they came about, and what the paper has."""
    run, compiling = ready[method].result()
    engine = gpu_steps.configured(sizes, name, method, load)
    forced = runs_of(name, workload, method, engine.batch, sizes.new)
    state = begun(engine, load, forced, coefficients)
    accepts, most = jnp.asarray(forced), np.int32(sizes.steps)
    state = run(held.params, state, np.int32(2), accepts)  # the first step of a request verifies; memory is found
    before = np.asarray(state.slots.emitted).sum()
    jax.block_until_ready(state.work)
    began = time.perf_counter()
    state = run(held.params, state, most, accepts)
    jax.block_until_ready(state.work)
    seconds = time.perf_counter() - began
    s = jax.device_get(state.slots)
    emitted = int(s.emitted.sum() - before)
    drafted, verifications = int(s.drafted_total.sum()), int(s.verifications.sum())
    return {
        "model": name,
        "workload": workload,
        "method": method,
        "batch": load.batch,
        "context": load.context,
        "tokens_per_second": emitted / seconds,
        "tokens_per_verification": int(s.emitted.sum()) / max(verifications, 1),
        "acceptance": int(s.accepted_total.sum()) / max(drafted, 1),
        "steps": int(s.steps.max()),
        "seconds": seconds,
        "compile_seconds": compiling,
        "paper": of_paper(name, workload, method),
    }


def of_paper(name: str, workload: str, method: str) -> dict[str, Any] | None:
    """The paper's figures of a run (arXiv 2609.17943, tables 1 and 6 to 10), None of a method it does not have.

    Of ASPIRE-FSM it tells neither rows nor tokens per verification.
    """
    if method not in TABLE:
        return None
    column, table = machine.WORKLOADS.index(workload), machine.tables()
    known = TABLE[method] in table["detail"][workload][name]
    row = machine.row(workload, name, TABLE[method]) if known else None
    speed = table["throughput_tok_s"][name]
    return {
        "tokens_per_second": speed[TABLE[method]][column],
        "speedup": speed[TABLE[method]][column] / speed["AutoRegressive"][column],
        "tokens_per_verification": None if row is None else row.per_verification,
        "batch": None if row is None else row.batch,
    }
