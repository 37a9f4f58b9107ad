"""Acceptance traces: what would every draft have been worth?

    trace = tracing.record(model, prompts, cadence="every", max_tokens=96)
    trace.save("trace.npz")
    answers = aspire_jax.generate(model, prompts, method="oracle", trace=tracing.load("trace.npz"))

A trace is recorded by drafting to `d_max` before every verification. Schedulers can be replayed on it without a model,
and the hindsight oracle is one: it drafts exactly what the trace accepted. The file's schema is in `file.py`.
"""

from __future__ import annotations

from aspire_jax.tracing.file import Trace, load
from aspire_jax.tracing.record import Recording, record, record_pass, record_prepared, recorder
from aspire_jax.tracing.replay import Replay, engine_and_hooks

__all__ = [
    "Recording",
    "Replay",
    "Trace",
    "engine_and_hooks",
    "load",
    "record",
    "record_pass",
    "record_prepared",
    "recorder",
]
