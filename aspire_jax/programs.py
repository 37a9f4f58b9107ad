"""The compiled programs of an engine: a fixed set, made before the first request and never again.

They are compiled ahead of time from abstract arguments. A call whose arguments differ in shape, dtype or place raises;
it cannot compile silently, so no measured time has a compilation in it.
"""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from aspire_jax import engine as engine_lib
from aspire_jax import observation, pause, prefix
from aspire_jax import prefill as prefill_lib
from aspire_jax import step as step_lib
from aspire_jax.cache import KVCache
from aspire_jax.costs import TERMS, CostModel
from aspire_jax.engine import Engine, State
from aspire_jax.params import Params
from aspire_jax.sampling import rows as sampling_rows

# What XLA records as CUDA graphs ("command buffers"), so that a layer is launched as one thing: all that it is made of,
# the kernels too, and no loop, because the host must know which layer a turn is about.
COMMAND_BUFFERS = {
    "on": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL",
    "off": "",
}
# Which of them the library compiles with, whatever XLA_FLAGS says. No GPU has been timed: this is jax's own choice, and
# `python -m bench.gpu` measures both and says which is faster.
LAUNCH = "on"


def compiler_options(engine: Engine, launch: str = LAUNCH) -> dict[str, bool | str]:
    """XLA options that the engine's programs are compiled with.

    Kernels run on a GPU, where layers are scanned. There a product that XLA gives to Triton copies the layer's weights
    out of the stack first, three times the traffic; one that it gives to cuBLAS reads them where they lie.

    Args:
      launch: a key of `COMMAND_BUFFERS`; for measurements.
    """
    if engine.kernels != "triton":
        return {}
    return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_command_buffer": COMMAND_BUFFERS[launch]}


@dataclasses.dataclass(eq=False)
class Programs:
    """Compiled `init`, `prefill`, `copy_prefix`, `admit`, `observe_prompt`, `run` and `pause.run`.

    Without the static engine argument; the state is donated.

    Attributes:
      home: where state lives.
      pause: `pause.run`, None where the draft-length policy asks for no such thing.
      observe: `observe_prompt`, None where the context policy asks for no such thing.
      blank: as `init`, without a cache: takes over one that is already filled.
      chunk: tokens that `prefill` takes.
      rehearsed: whether `rehearse` was called.
    """

    home: Sharding
    chunk: int
    init: Any
    blank: Any
    prefill: Any
    copy_prefix: Any
    admit: Any
    run: Any
    pause: Any = None
    observe: Any = None
    rehearsed: bool = False


def compiled(engine: Engine, params: Params, chunk: int) -> Programs:
    """The programs of `engine` for `params` like these; compiled by the first call, remembered for later ones.

    Args:
      chunk: tokens that a call of `prefill` takes.
    """
    leaves, tree = jax.tree.flatten(params)
    return _compile(engine, chunk, tree, tuple((x.shape, x.dtype, x.sharding) for x in leaves))


# A program of unrolled layers holds some 3,000 memory mappings, and a process may have 65,530: past them it dies.
@functools.lru_cache(maxsize=12)
def _compile(engine: Engine, chunk: int, tree: Any, leaves: tuple[tuple[Any, Any, Sharding], ...]) -> Programs:
    home = _home(leaves[0][2])
    params = tree.unflatten([jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype, where in leaves])

    def at_home(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    cost = CostModel(at_home(jax.ShapeDtypeStruct((TERMS,), jnp.float32)))
    state = jax.tree.map(at_home, jax.eval_shape(functools.partial(engine_lib.init, engine), cost))
    number = ints()
    support, settings = engine.sampling, None
    if support is not None:
        settings = jax.eval_shape(lambda: sampling_rows.greedy(support, engine.config.vocab_size))
    jits = {
        "init": _lowered(engine_lib.init, engine, cost),
        "blank": _lowered(_without_cache, engine, cost),
        "prefill": _lowered(prefill_lib.prefill, engine, params, state, number, ints(chunk), number, number, donate=1),
        "copy_prefix": _lowered(prefix.copy, engine, state, number, number, number, donate=0),
        "admit": _lowered(
            prefill_lib.admit, engine, state, number, number, number, number, ints(engine.max_stop), settings, donate=0
        ),
        "run": _lowered(step_lib.run, engine, params, state, number, number, number, number, donate=1),
    }
    if engine.pauses:
        jits["pause"] = _lowered(pause.run, engine, params, state, number, number, number, donate=1)
    window = engine.plan.prompt_window
    if window:
        jits["observe"] = _lowered(
            observation.observe_prompt, engine, params, state, number, ints(window), number, donate=1
        )
    options = compiler_options(engine)
    with ThreadPoolExecutor(2) as pool:  # prefill and run are most of it, and XLA compiles without Python's lock
        done = dict(zip(jits, pool.map(lambda lowered: lowered.compile(options), jits.values()), strict=True))
    return Programs(home, chunk, **done)


def rehearse(programs: Programs, engine: Engine, params: Params, state: State) -> KVCache:
    """Runs a prefill and every shape of step once: what XLA builds at its first run belongs to compiling.

    Takes the state, whose slots must all be idle, and returns its cache.
    """
    # Rows of one block, so that loops over blocks have a turn.
    length = np.full((engine.batch,), min(engine.block, engine.capacity - 1), np.int32)
    nothing = np.zeros((programs.chunk,), np.int32)  # no token of it counts, so none is written
    state = programs.prefill(params, state, np.int32(0), nothing, length[0], np.int32(0))
    one, everyone, never = np.int32(1), np.int32(engine.batch), np.int32(step_lib.NEVER)
    steps: list[tuple[Any, tuple[np.int32, ...]]]
    steps = [(programs.run, (np.int32(shape), never)) for shape in range(len(engine.shapes.all))]
    if programs.pause is not None:
        steps += [(programs.pause, (np.int32(shape),)) for shape in range(len(pause.plain(engine).shapes.all))]
    for run, how in steps:
        slots = dataclasses.replace(state.slots, length=jax.device_put(length, programs.home))
        state = run(params, dataclasses.replace(state, slots=slots), one, everyone, *how)
    jax.block_until_ready(state.work)
    programs.rehearsed = True
    return state.cache


def _lowered(function: Any, engine: Engine, *arguments: Any, donate: int | None = None) -> Any:
    """`function` for `engine`, lowered; `donate` is the place of the state among `arguments`.

    Jitted as a partial of its own, not with the engine as a static argument: jax's caches keep what they hold of a
    function as long as there is the function, so a program would outlive its place in the cache above.
    """
    return jax.jit(functools.partial(function, engine), donate_argnums=donate).lower(*arguments)


def _without_cache(engine: Engine, cost: CostModel) -> State:
    return dataclasses.replace(engine_lib.init(engine, cost), cache=KVCache((), ()))


def _home(sharding: Sharding) -> Sharding:
    """The params' device; replicated over their mesh where there are several."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding
