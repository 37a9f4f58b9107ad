"""What is compiled, how often, and how much memory it takes: the cache is never copied."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng
from aspire_jax import methods, params, pause, prefill, prefix, programs, step
from aspire_jax.context import RefreshContext
from aspire_jax.draft_length import AspireDraftLength
from aspire_jax.sampling import draw
from aspire_jax.sampling import rows as sampling_rows
from aspire_jax.sampling.rows import Support

from . import tiny
from .tiny import Request

C = next(iter(tiny.MODELS.values()))


@pytest.mark.parametrize("method", ["plain", "aspire"])
def test_each_program_is_compiled_once(method: str) -> None:
    """Whatever the prompts, their lengths, the limits, the stop tokens and the cost coefficients."""
    # A size of its own, so that no other test has compiled these.
    fields: dict[str, Any] = {"batch": 3, "capacity": 72, "max_new": 11}
    engine = tiny.make(C, **fields)
    if method == "aspire":
        engine = tiny.aspire(C, in_step=True, renew="verification", d_max=1, **fields)
    functions = (tiny.init, tiny.write_chunk, tiny.admit, tiny.run)
    before = [f._cache_size() for f in functions]
    for seed, (lengths, new, stop, prices) in enumerate(
        [
            ((1, 2, 3), 11, (), tiny.COST),
            ((40, 1, 60, 17, 5), 7, (3, 4), (1.0, 2.0, 3.0, 4.0)),
            ((62,), 1, (1, 2, 3), (1e-3, 0.0, 0.0, 1e-9)),
        ]
    ):
        requests = [Request(p, new, stop) for p in tiny.prompts(lengths, seed)]
        answers, _ = tiny.serve(engine, requests, prices=tiny.cost(*prices), burst=3 + seed)
        assert len(answers) == len(lengths)
    assert [f._cache_size() - n for f, n in zip(functions, before, strict=True)] == [1, 1, 1, 1]


def test_forgotten_programs_leave_memory() -> None:
    """Those that nobody holds any more: a process has room for a limited number."""
    engine = tiny.make(C, batch=3, capacity=72, max_new=10)
    backend = jax.devices()[0].client
    before = len(backend.live_executables())
    made = programs.compiled(engine, tiny.params_of(engine), 16)
    assert made is programs.compiled(engine, tiny.params_of(engine), 16)
    assert len(backend.live_executables()) >= before + 5
    del made
    programs._compile.cache_clear()
    assert len(backend.live_executables()) <= before


@pytest.mark.parametrize("method", ["autoregressive", "aspire", "vegas"])
def test_a_rehearsal_runs_every_shape_and_keeps_the_cache(method: str) -> None:
    sizes = {"batch": 2, "capacity": 48, "page_size": 4, "max_new": 4}
    policies = {
        "autoregressive": {},
        "aspire": {"d_max": 2, "k_min": 1, "recent": 1},
        "vegas": {"gamma": 2, "least": 8},
    }[method]
    engine = methods.configure(C, method, options=policies, **sizes)
    params_of = tiny.params_of(engine)
    made = programs.compiled(engine, params_of, 16)
    state = made.init(tiny.cost(*tiny.COST))
    state = dataclasses.replace(state, cache=jax.tree.map(lambda x: x + x.dtype.type(3), state.cache))
    blank = made.blank(tiny.cost(*tiny.COST))
    seen: list[tuple[list[int], list[int]]] = []
    real, prefills, prefill = made.run, [], made.prefill

    def noted(run: Any) -> Any:
        def call(*args: Any) -> Any:
            after = run(*args)
            seen.append((np.asarray(after.shape_steps).tolist(), np.asarray(after.slots.steps).tolist()))
            return after

        return run and call

    made.run, made.pause = noted(made.run), noted(made.pause)
    made.prefill = lambda *args: prefills.append(args[3].shape) or prefill(*args)
    cache = programs.rehearse(made, engine, params_of, state)
    shapes = len(engine.shapes.all)
    assert made.rehearsed and shapes >= 2
    assert prefills == [(16,)]
    # Every row in each.
    assert seen[shapes - 1] == ([1] * shapes, [shapes] * engine.batch)
    plain = {"aspire": 2}.get(method, 0)  # shapes of the program without drafts
    assert len(seen) == shapes + plain
    assert seen[-1][1] == [shapes + plain] * engine.batch and sum(seen[-1][0]) == shapes + plain
    assert all((np.asarray(x) == 3).all() for x in jax.tree.leaves(cache))
    assert not np.asarray(blank.slots.active).any()
    # Without it, a state without active rows takes no step.
    idle = dataclasses.replace(blank, cache=cache)
    after = real(params_of, idle, np.int32(5), np.int32(2), np.int32(-1), np.int32(step.NEVER))
    assert not np.asarray(after.shape_steps).any()


# Tokens are wide (2 KiB over two layers) beside the scores a query keeps of them (4 bytes), and contexts long.
WIDE = tiny.config(heads=1, kv=1, head_dim=128, max_length=1 << 17)
SCANNED = dataclasses.replace(WIDE, n_layers=6)
CAPACITY = 1 << 16
# Layers' keys and values that a scanned program slices out of the stack at a time: one for each segment and branch.
# Unrolled layers have leaves of their own.
SLICES = 4


def wide(method: str, **fields: Any) -> eng.Engine:
    fields = {"capacity": CAPACITY, "batch": 2, "page_size": 16} | fields
    c = WIDE if fields.get("unrolled", True) else SCANNED
    if method == "plain":
        return tiny.make(c, **fields)
    in_step = method == "in step"
    context = RefreshContext(k_min=2, recent=1, rho=0.005, renew="verification" if in_step else "step")
    draft = AspireDraftLength(d_max=1, gamma_init=1, in_step=in_step)
    return tiny.make(c, context, draft, mixed=not in_step, **fields)


EVERYTHING = Support(acceptance="rejection", penalties=True, bias=True, logprobs=5)
WIDE_ENGINES = {
    "plain dense": wide("plain"),
    "plain packed": wide("plain", dense=False),
    "plain packed scanned": wide("plain", dense=False, unrolled=False),
    "plain packed, any table": wide("plain", dense=False, consecutive=False),
    "in step dense": wide("in step"),
    "in step dense, rejecting": wide("in step", sampling=EVERYTHING),
    "mixed dense": wide("mixed"),
    "mixed packed, any table": wide("mixed", dense=False, consecutive=False),
    "mixed reproducible": wide("mixed", reproducible=True),
    "mixed reproducible scanned, any table": wide("mixed", reproducible=True, unrolled=False, consecutive=False),
    "mixed packed scanned": wide("mixed", dense=False, unrolled=False),
}


def abstract(engine: eng.Engine) -> tuple[Any, eng.State]:
    weights = params.abstract(engine.config, jnp.float32)
    if engine.unrolled:
        weights = jax.eval_shape(params.unstack, weights)
    return weights, jax.eval_shape(functools.partial(eng.init, engine), tiny.cost())


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check_memory(engine: eng.Engine, state: eng.State, lowered: Any) -> None:
    """Little beside the arguments is ever held, and the cache that comes out is the one that went in."""
    cache = bytes_of(state.cache)
    assert cache == 2 * CAPACITY * 1024 * engine.config.n_layers
    memory = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis()
    allowed = 0.1 if engine.unrolled else 0.1 + SLICES / engine.config.n_layers
    if not engine.consecutive and engine.d_max:  # page scores: one layer's keys, row by row
        allowed += 0.5 / engine.config.n_layers
    assert memory.temp_size_in_bytes < allowed * cache
    assert memory.alias_size_in_bytes >= cache
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.01 * cache


@pytest.mark.parametrize("engine", WIDE_ENGINES.values(), ids=WIDE_ENGINES)
def test_the_loop_does_not_copy_the_cache(engine: eng.Engine) -> None:
    weights, state = abstract(engine)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    run = jax.jit(step.run, static_argnums=0, donate_argnums=2)
    check_memory(engine, state, run.lower(engine, weights, state, number, number))


@pytest.mark.parametrize("name", ["in step dense, rejecting", "mixed packed scanned", "mixed reproducible"])
def test_a_pause_copies_neither_the_cache_nor_what_drafting_needs(name: str) -> None:
    engine = WIDE_ENGINES[name]
    weights, state = abstract(engine)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    rest = jax.jit(pause.run, static_argnums=0, donate_argnums=2)
    lowered = rest.lower(engine, weights, state, number, number)
    check_memory(engine, state, lowered)
    memory = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis()
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1 << 16


def test_drawing_does_not_copy_the_proposals() -> None:
    """Nor does what it holds grow with the width of the step: 66 tokens here, two at a time."""
    batch, d_max, v = 2, 32, 1 << 15
    tokens = batch * (d_max + 1)

    def one(sampling: Any, packed: Any, rows: Any, token: Any, margin: Any) -> Any:
        return draw.draw(EVERYTHING, sampling, packed, rows, jnp.int32(d_max + 1), token, margin)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def bools(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, bool)

    sampling = jax.eval_shape(lambda: sampling_rows.init(EVERYTHING, v, batch, 8, d_max))
    margin = jax.ShapeDtypeStruct((tokens,), jnp.float32)
    packed = draw.Packed(jax.ShapeDtypeStruct((tokens, v), jnp.float32), ints(tokens), ints(tokens), bools(tokens))
    rows = draw.Rows(bools(batch), ints(batch, d_max), ints(batch), ints(batch), ints(batch), ints(batch, 3))
    lowered = jax.jit(one, donate_argnums=0).lower(sampling, packed, rows, ints(tokens), margin)
    memory = lowered.compile().memory_analysis()
    proposals = bytes_of(sampling.proposals)
    assert proposals == 4 * batch * d_max * v
    assert memory.temp_size_in_bytes < 0.75 * proposals
    assert memory.alias_size_in_bytes >= proposals


@pytest.mark.parametrize(
    "name", ["plain dense", "plain packed scanned", "plain packed, any table", "mixed reproducible"]
)
def test_prefill_does_not_copy_the_cache(name: str) -> None:
    engine = WIDE_ENGINES[name]
    weights, state = abstract(engine)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    tokens = jax.ShapeDtypeStruct((64,), jnp.int32)
    write = jax.jit(prefill.prefill, static_argnums=0, donate_argnums=2)
    check_memory(engine, state, write.lower(engine, weights, state, number, tokens, number, number))


@pytest.mark.parametrize("name", ["plain dense", "plain packed scanned", "plain packed, any table"])
def test_a_shared_beginning_does_not_copy_the_cache(name: str) -> None:
    engine = WIDE_ENGINES[name]
    _, state = abstract(engine)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    copy = jax.jit(prefix.copy, static_argnums=0, donate_argnums=1)
    check_memory(engine, state, copy.lower(engine, state, number, number, number))


def test_admission_does_not_copy_the_cache() -> None:
    engine = WIDE_ENGINES["plain dense"]
    _, state = abstract(engine)
    number, stop = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((engine.max_stop,), jnp.int32)
    admit = jax.jit(prefill.admit, static_argnums=0, donate_argnums=1)
    check_memory(engine, state, admit.lower(engine, state, number, number, number, number, stop))


def test_a_context_of_100_000_tokens() -> None:
    """Both methods give the same tokens over a cache filled at random, as fast as the loop goes."""
    length, new = 100_000, 24
    c = tiny.config(max_length=1 << 17)
    fields: dict[str, Any] = {"batch": 2, "capacity": 100_032, "page_size": 16, "max_new": new}
    context = RefreshContext(rho=0.01, renew="verification")
    draft = AspireDraftLength(d_max=2, gamma_init=2, w=1.0, in_step=True, regret_share=None)
    engines = [tiny.make(c, **fields), tiny.make(c, context, draft, mixed=False, **fields)]
    rng = np.random.default_rng(0)
    shape = (c.n_kv_heads, 2 * 100_032 // 16, 16, c.head_dim)
    filled = [jnp.asarray(3 * rng.standard_normal(shape, np.float32)) for _ in range(2 * c.n_layers)]
    outs, run = [], jax.jit(step.run, static_argnums=0, donate_argnums=2)
    for engine in engines:
        state = tiny.start(engine)
        k, v = (tuple(jnp.array(x) for x in part) for part in (filled[: c.n_layers], filled[c.n_layers :]))
        state = state.replace(cache=state.cache.replace(k=k, v=v))
        for slot, held in enumerate((length, 70_001)):
            args = [jnp.int32(x) for x in (slot, held, 7 + slot, new)]
            state = tiny.admit(engine, state, *args, jnp.full((engine.max_stop,), -1, jnp.int32))
        state = run(engine, tiny.params_of(engine), state, jnp.int32(200), jnp.int32(2))
        outs.append([tiny.answer(state, slot) for slot in (0, 1)])
        assert np.asarray(state.slots.length).tolist() == [length + new, 70_001 + new]
    tiny.assert_same(outs[1], outs[0])
    assert sum(a.drafted for a in outs[1]) > 0
    assert all(len(a.tokens) == new for a in outs[1])
