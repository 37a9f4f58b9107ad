"""Exact long-context batch decoding by asynchronous self-speculation, in JAX.

    import aspire_jax

    model = aspire_jax.load("smollm2-135m")
    for completion in aspire_jax.generate(model, ["The capital of France is"], max_tokens=16):
        print(completion.text)

`stream` yields the answers piece by piece; `aspire_jax.pure` is the layer of pure functions below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aspire_jax import pure
    from aspire_jax.config import ModelConfig, RopeConfig
    from aspire_jax.errors import InputError
    from aspire_jax.host import Stream
    from aspire_jax.loading import Model, load
    from aspire_jax.methods import METHODS, Method
    from aspire_jax.request import Request
    from aspire_jax.results import Chunk, Completion, Report, Stats, TokenLogprob
    from aspire_jax.serving import generate, stream

__all__ = [
    "METHODS",
    "Chunk",
    "Completion",
    "InputError",
    "Method",
    "Model",
    "ModelConfig",
    "Report",
    "Request",
    "RopeConfig",
    "Stats",
    "Stream",
    "TokenLogprob",
    "generate",
    "load",
    "pure",
    "stream",
]

_HOME = {
    "METHODS": "methods",
    "Chunk": "results",
    "Completion": "results",
    "InputError": "errors",
    "Method": "methods",
    "Model": "loading",
    "ModelConfig": "config",
    "Report": "results",
    "Request": "request",
    "RopeConfig": "config",
    "Stats": "results",
    "Stream": "host",
    "TokenLogprob": "results",
    "generate": "serving",
    "load": "loading",
    "stream": "serving",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that a command line can show its help, or refuse bad input, without waiting for jax."""
    if name == "pure":
        return importlib.import_module("aspire_jax.pure")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"aspire_jax.{_HOME[name]}"), name)
