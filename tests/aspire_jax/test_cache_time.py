"""A step's time follows the context, not the cache's size: what the memory analysis says, seen from outside."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import engine as eng

from . import tiny

# A token is 1 KiB in a layer, so the larger cache is 256 MiB: a copy would take tens of milliseconds, a step takes one.
WIDE = tiny.config(layers=1, heads=1, kv=1, head_dim=128, max_length=1 << 18)
STEPS = 8


def fastest(engine: eng.Engine) -> float:
    """Seconds of a run of STEPS steps at 64 tokens of context, the best of several."""
    state = tiny.init(engine, tiny.cost(*tiny.COST))
    never = jnp.full((engine.max_stop,), -1, jnp.int32)
    for slot in range(engine.batch):
        state = tiny.admit(
            engine, state, jnp.int32(slot), jnp.int32(64), jnp.int32(1), jnp.int32(engine.max_new), never
        )
    params = tiny.params_of(engine)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        state = tiny.run(engine, params, state, jnp.int32(STEPS), jnp.int32(engine.batch))
        jax.block_until_ready(state.work)
        seconds.append(time.perf_counter() - start)
    assert np.asarray(state.slots.emitted).tolist() == [6 * STEPS] * engine.batch
    return min(seconds)


def test_a_larger_cache_costs_a_step_nothing() -> None:
    small, large = (tiny.make(WIDE, batch=2, capacity=c, page_size=16, max_new=64) for c in (1 << 12, 1 << 17))
    assert fastest(large) < 4 * fastest(small) + 0.02 * STEPS
