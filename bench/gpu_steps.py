"""Step times of a whole model: plain, all rows drafting, all verifying, and a mixture; and the cost model's fit.

With CUDA graphs and without: `aspire_jax.programs.LAUNCH` is what the library has decided between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import engine as engine_lib
from aspire_jax import methods, params, prefill, programs, step
from aspire_jax.cache import KVCache
from aspire_jax.context import PromptWeights, RefreshContext
from aspire_jax.costs import TERMS, CostModel
from aspire_jax.draft_length import DRAFT, VERIFY, Outcome, View
from aspire_jax.engine import Engine, State
from bench import gpu_plan
from bench.gpu_sizes import Load, Sizes


@flax.struct.dataclass
class Roles:
    """verify: [B] bool, rows that verify in the next step; the host sets it between runs."""

    verify: jax.Array


@dataclasses.dataclass(frozen=True)
class Told:
    """Each row does what the host says."""

    d_max: int

    def init(self, batch: int) -> Roles:
        return Roles(jnp.zeros((batch,), bool))

    def decide(self, state: Roles, view: View) -> jax.Array:
        return jnp.where(state.verify, VERIFY, DRAFT).astype(jnp.int32)

    def update(self, state: Roles, outcome: Outcome) -> Roles:
        return state

    def forget(self, state: Roles, rows: jax.Array) -> Roles:
        return state


# Methods with a limit of drafts that is not theirs to choose; `adaptive` keeps its own.
_CAPPED = ("aspire", "aspire-fsm", "oracle")


def configured(sizes: Sizes, name: str, method: str | methods.Method, load: Load) -> Engine:
    """An engine on the kernels, for the rows and contexts given."""
    options = {"d_max": sizes.d_max} if method in _CAPPED else {}
    return methods.configure(
        sizes.models[name], method, batch=load.batch, capacity=load.context + sizes.new, max_new=sizes.new,
        page_size=sizes.page_size, dtype=sizes.dtype, implementation=sizes.implementation, interpret=sizes.interpret,
        unrolled=False, options=options,
    )  # fmt: skip


class Held(contextlib.ExitStack):
    """A model's weights while it is measured; they are freed behind it. params: see `weights`."""

    params: Any = None


def weights(sizes: Sizes, name: str, held: Held) -> str:
    """Makes random params whose logits are all equal: every token is 0 then, and what is accepted can be chosen.

    The last norm's scale is zero; everything is read and computed as ever.
    """
    make = jax.jit(functools.partial(params.random, sizes.models[name], dtype=jnp.dtype(sizes.dtype)))
    made = make(jax.random.key(0))
    made["final_norm"] = jnp.zeros_like(made["final_norm"])
    held.callback(lambda: [x.delete() for x in jax.tree.leaves(made)])
    held.params = jax.block_until_ready(made)
    return f"random, {params.count(sizes.models[name]):,} parameters"


def compiled(engine: Engine, function: Any, weights: Any, *arguments: Any, launch: str = programs.LAUNCH) -> Any:
    """`function` of (engine, params, state, ...) compiled as the library compiles it; the state is donated.

    From abstract arguments: nothing is held meanwhile.
    """
    state = jax.eval_shape(functools.partial(engine_lib.init, engine), _no_cost())
    lowered = jax.jit(function, static_argnums=0, donate_argnums=2).lower(engine, weights, state, *arguments)
    return lowered.compile(programs.compiler_options(engine, launch))


def _no_cost() -> CostModel:
    return CostModel(jnp.ones((TERMS,), jnp.float32))


_init = jax.jit(engine_lib.init, static_argnums=0)
_admit = jax.jit(prefill.admit, static_argnums=0, donate_argnums=1)


@functools.partial(jax.jit, donate_argnums=0)
def _filled(cache: KVCache) -> KVCache:
    """Keys that differ from page to page, so that scores do and a selection is scattered; values are left zero.

    A hash of the place in place of random numbers: those of a whole cache need more memory than it has.
    """
    assert isinstance(cache.k, jax.Array)
    place = jnp.zeros(cache.k.shape, jnp.uint32)
    for axis in range(cache.k.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, cache.k.shape, axis)
        place = (index ^ (place >> 15)) * np.uint32(2654435761) + place
    k = (place >> 16).astype(jnp.float32) / np.float32(1 << 15) - np.float32(1)
    return KVCache(k.astype(cache.k.dtype), cache.v)


def started(engine: Engine, context: int) -> State:
    """A state whose slots go on from `context` tokens, as if a prompt of that length had been admitted to each."""
    state = _init(engine, _no_cost())
    state = dataclasses.replace(state, cache=_filled(state.cache))
    never = np.full((engine.max_stop,), -1, np.int32)
    for slot in range(engine.batch):
        state = _admit(engine, state, np.int32(slot), np.int32(context), np.int32(0), np.int32(engine.max_new), never)
    window, c = engine.plan.prompt_window, engine.config
    if window:  # the attention of a prompt that there is none of
        policy: Any = engine.context
        weights = jax.random.uniform(jax.random.key(1), (c.n_layers, c.n_kv_heads, engine.capacity))
        prompt = PromptWeights(jnp.ones((engine.batch,), bool), jnp.int32(context + 1 - window), weights)
        state = dataclasses.replace(state, context=jax.jit(policy.observe_prompt)(state.context, prompt))
    return state


def measure(sizes: Sizes, name: str, held: Held, load: Load, copy: float | None) -> dict[str, Any]:
    """Median milliseconds of each kind of step at three context lengths, compile time, memory, fitted coefficients.

    Beside each the least time: that of reading at the rate `copy` (GB/s) what `gpu_plan.step_bytes` counts.
    """
    engine = configured(sizes, name, methods.Method(RefreshContext(), Told(sizes.d_max), mixed=True), load)
    batch, weights = engine.batch, held.params
    one = (np.int32(1), np.int32(batch))
    launches = [programs.LAUNCH] + [x for x in programs.COMMAND_BUFFERS if x != programs.LAUNCH and not sizes.interpret]
    began = time.perf_counter()
    with ThreadPoolExecutor(len(launches)) as pool:
        runs = list(pool.map(lambda x: compiled(engine, step.run, weights, *one, launch=x), launches))
    found: dict[str, Any] = {
        "compile_seconds": time.perf_counter() - began, "batch": batch, "context": load.context, "steps": [],
    }  # fmt: skip
    equations: list[tuple[np.ndarray, float]] = []
    state = started(engine, load.context)
    together: dict[str, float] = {}
    for launch, run in zip(launches, runs, strict=True):
        chosen = launch == programs.LAUNCH
        for context in (load.context // 4, load.context // 2, load.context) if chosen else (load.context,):
            state, times, works = _steps(run, weights, _at(state, context), sizes)
            medians = {kind: statistics.median(values) for kind, values in times.items()}
            together[launch] = 1e3 * sum(medians.values())  # the last is at the whole context
            equations += [(works[kind], seconds) for kind, seconds in medians.items()] if chosen else []
            for kind, seconds in medians.items():
                drafting = {"draft": 1.0, "mixed": 0.5}.get(kind.split(":")[0], 0.0)
                least = gpu_plan.step_bytes(sizes, name, Load(batch, context), drafting) / 1e6 / copy if copy else None
                found["steps"].append(
                    {"kind": kind, "context": context, "launch": launch, "milliseconds": 1e3 * seconds, "least": least}
                )
    del state
    if len(together) > 1:
        faster = min(together, key=lambda x: together[x])
        found["launch"] = {"library": programs.LAUNCH, "faster": faster, "milliseconds_of_all_kinds": together}
    found["fit"] = _fit(equations)
    with contextlib.suppress(AttributeError, TypeError):
        found["peak_bytes"] = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return found


def _at(state: State, context: int) -> State:
    """All rows at `context` tokens, no draft held, nothing emitted, the room for new tokens all there."""
    s = state.slots
    slots = dataclasses.replace(
        s,
        length=jnp.full_like(s.length, context),
        drafted=jnp.zeros_like(s.drafted),
        emitted=jnp.zeros_like(s.emitted),  # each a buffer of its own: the state is donated
        active=jnp.ones_like(s.active),
        fresh=jnp.zeros_like(s.fresh),
    )
    return dataclasses.replace(state, slots=slots)


def _steps(
    run: Any, weights: Any, state: State, sizes: Sizes
) -> tuple[State, dict[str, list[float]], dict[str, np.ndarray]]:
    batch = state.slots.length.shape[0]
    times: dict[str, list[float]] = {}
    works: dict[str, np.ndarray] = {}

    def go(kind: str | None, verify: Any, state: State) -> State:
        roles = Roles(jnp.asarray(verify, bool))
        before = np.asarray(state.work)
        state = dataclasses.replace(state, draft_length=roles)
        jax.block_until_ready(state.slots.length)
        began = time.perf_counter()
        state = run(weights, state, np.int32(1), np.int32(batch))
        jax.block_until_ready(state.slots.length)
        if kind is not None:
            times.setdefault(kind, []).append(time.perf_counter() - began)
            works[kind] = np.asarray(state.work) - before
        return state

    every, none = np.ones(batch, bool), np.zeros(batch, bool)
    half = np.arange(batch) < batch // 2
    state = go(None, every, state)  # a first run finds memory, and has every row measured
    many, some = min(5, sizes.d_max), min(3, sizes.d_max - 1)
    for _ in range(sizes.repeats):
        state = go("plain", every, state)
        for drafts in range(many):
            state = go("draft" if drafts else None, none, state)
        state = go(f"verify {many + 1}", every, state)
        for _ in range(some):
            state = go(None, none, state)
        state = go(f"mixed: half verify {some + 1}", half, state)
        state = go(None, every, state)
    return state, times, works


def _fit(equations: list[tuple[np.ndarray, float]]) -> dict[str, Any]:
    """Coefficients of the cost model by least squares of relative errors, their standard errors, how far it is off."""
    work, seconds = np.stack([w for w, _ in equations]).astype(np.float64), np.array([s for _, s in equations])
    scale = np.maximum(np.abs(work).max(axis=0), 1e-30)
    relative = work / scale / seconds[:, None]
    solved = np.linalg.lstsq(relative, np.ones(len(seconds)), rcond=None)[0] / scale
    off = work @ solved / seconds - 1
    spread = float(np.sum(off**2)) / max(len(seconds) - work.shape[1], 1)
    errors = np.sqrt(np.maximum(np.diag(np.linalg.pinv(relative.T @ relative)) * spread, 0)) / scale
    return {
        "coefficients": solved.tolist(),
        "standard_errors": errors.tolist(),
        "mean_absolute_percentage_error": 100 * float(np.abs(off).mean()),
    }
