"""Step times of a whole model: plain, all rows drafting, all verifying, and a mixture; and the cost model's fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import engine as engine_lib
from aspire_jax import methods, params, prefill, programs, step
from aspire_jax.context import RefreshContext
from aspire_jax.costs import TERMS, CostModel
from aspire_jax.draft_length import DRAFT, VERIFY, Outcome, View
from aspire_jax.engine import Engine, State
from bench.gpu_sizes import Sizes


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


def configured(sizes: Sizes, name: str, method: str | methods.Method) -> Engine:
    """An engine on the kernels, at the sizes given."""
    policy = methods.METHODS[method].draft_length if isinstance(method, str) else None
    options = {"d_max": sizes.d_max} if hasattr(policy, "gamma_init") else {}
    return methods.configure(
        sizes.models[name], method, batch=sizes.batch[name], capacity=sizes.context + sizes.new, max_new=sizes.new,
        page_size=sizes.page_size, dtype=sizes.dtype, implementation="pallas", interpret=sizes.interpret,
        options=options,
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


def compiled(engine: Engine, function: Any, *arguments: Any, options: dict[str, Any] | None = None) -> Any:
    """`function` of (engine, params, state, ...) compiled as the library compiles it; the state is donated."""
    jitted = jax.jit(function, static_argnums=0, donate_argnums=2)
    return jitted.lower(engine, *arguments).compile({**programs.compiler_options(engine), **(options or {})})


_init = jax.jit(engine_lib.init, static_argnums=0)
_admit = jax.jit(prefill.admit, static_argnums=0, donate_argnums=1)


def started(engine: Engine, context: int) -> State:
    """A state whose slots go on from `context` tokens over an empty cache: contents do not matter for time."""
    state = _init(engine, CostModel(jnp.ones((TERMS,), jnp.float32)))
    never = np.full((engine.max_stop,), -1, np.int32)
    for slot in range(engine.batch):
        state = _admit(engine, state, np.int32(slot), np.int32(context), np.int32(0), np.int32(engine.max_new), never)
    return state


def measure(sizes: Sizes, name: str, held: Held, copy: float | None) -> dict[str, Any]:
    """Median milliseconds of each kind of step at three context lengths, compile time, memory, fitted coefficients."""
    engine = configured(sizes, name, methods.Method(RefreshContext(), Told(sizes.d_max), mixed=True))
    batch, weights = engine.batch, held.params
    state = started(engine, sizes.context)
    one = (np.int32(1), np.int32(batch))
    found: dict[str, Any] = {"steps": [], "batch": batch, "context": sizes.context}
    equations: list[tuple[np.ndarray, float]] = []
    variants = {"": {}} if sizes.interpret else {"": {}, "no command buffers": {"xla_gpu_enable_command_buffer": ""}}
    for variant, options in variants.items():
        began = time.perf_counter()
        run = compiled(engine, step.run, weights, state, *one, options=options)
        found[f"compile_seconds {variant}".strip()] = time.perf_counter() - began
        contexts = (sizes.context // 4, sizes.context // 2, sizes.context) if not variant else (sizes.context,)
        for context in contexts:
            state, times, works = _steps(run, weights, _at(state, context), sizes)
            for kind, values in times.items():
                label = " ".join(x for x in (kind, f"at {context}", variant) if x)
                found["steps"].append({"kind": label, "milliseconds": 1e3 * statistics.median(values)})
                equations += [(works[kind], statistics.median(values))] if not variant else []
    del state
    found["fit"] = _fit(equations)
    with contextlib.suppress(AttributeError, TypeError):
        found["peak_bytes"] = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    if copy:
        least = params.count(engine.config) * np.dtype(jnp.dtype(sizes.dtype)).itemsize / copy / 1e9
        found["milliseconds_to_read_weights"] = 1e3 * least
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
    state = go(None, every, state)  # a first run finds memory, and gives every row its selection
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
    """Coefficients of the cost model by least squares of relative errors, and how far it is off."""
    work, seconds = np.stack([w for w, _ in equations]).astype(np.float64), np.array([s for _, s in equations])
    scale = np.maximum(np.abs(work).max(axis=0), 1e-30)
    solved = np.linalg.lstsq(work / scale / seconds[:, None], np.ones(len(seconds)), rcond=None)[0] / scale
    off = np.abs(work @ solved / seconds - 1)
    return {"coefficients": solved.tolist(), "mean_absolute_percentage_error": 100 * float(off.mean())}
