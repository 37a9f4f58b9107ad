"""The pure layer: functions of arrays for programs that jit them themselves.

    engine = pure.configure(config, "aspire", batch=8, capacity=8192, max_new=128)
    state = pure.init(engine, pure.CostModel(coefficients))
    state = pure.prefill(engine, params, state, slot, tokens, start, count)     for every chunk of a prompt
    state = pure.copy_prefix(engine, state, source, slot, count)                where another slot holds its beginning
    state = pure.admit(engine, state, slot, length, pending, max_new, stop)
    state = pure.observe_prompt(engine, params, state, slot, tokens, count)     where engine.plan.prompt_window is not 0
    state = pure.run(engine, params, state, max_steps, until_finished)          or pure.step, one at a time
    state = pure.pause(engine, params, state, max_steps, until_finished)        where no row holds drafts nor is to

Sampling: `configure(..., sampling=Support())`, and `settings(support, SamplingParams(...), prompt, vocabulary)` as the
last argument of `admit`.

`engine` is static (hashable); donate `state`, so that the cache is updated in place. `params` are unstacked, as
`aspire_jax.load` and `unstack` give them. What the steps emitted is in `state.slots`.
"""

from __future__ import annotations

from aspire_jax.costs import CostModel, Fit, roofline
from aspire_jax.engine import LENGTH, RUNNING, STOP, Engine, Slots, State, init
from aspire_jax.methods import METHODS, Method, configure
from aspire_jax.observation import observe_prompt, window_of
from aspire_jax.params import unstack
from aspire_jax.pause import run as pause
from aspire_jax.prefill import admit, chunks, prefill
from aspire_jax.prefix import copy as copy_prefix
from aspire_jax.sampling.params import SamplingParams, settings
from aspire_jax.sampling.rows import Settings, Support
from aspire_jax.step import run, step

__all__ = [
    "LENGTH",
    "METHODS",
    "RUNNING",
    "STOP",
    "CostModel",
    "Engine",
    "Fit",
    "Method",
    "SamplingParams",
    "Settings",
    "Slots",
    "State",
    "Support",
    "admit",
    "chunks",
    "configure",
    "copy_prefix",
    "init",
    "observe_prompt",
    "pause",
    "prefill",
    "roofline",
    "run",
    "settings",
    "step",
    "unstack",
    "window_of",
]
