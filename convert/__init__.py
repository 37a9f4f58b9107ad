"""Foreign checkpoints (Hugging Face safetensors, GGUF) to Orbax and back; the only place that knows their layouts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aspire_jax.errors import InputError
    from convert.aliases import ALIASES, resolve
    from convert.manifest import Manifest
    from convert.pipeline import convert
    from convert.source import read_config
    from convert.to_huggingface import to_hf

__all__ = ["ALIASES", "InputError", "Manifest", "convert", "read_config", "resolve", "to_hf"]

_HOME = {
    "ALIASES": "convert.aliases",
    "InputError": "aspire_jax.errors",
    "Manifest": "convert.manifest",
    "convert": "convert.pipeline",
    "read_config": "convert.source",
    "resolve": "convert.aliases",
    "to_hf": "convert.to_huggingface",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that a command line can show its help without waiting for jax and Orbax."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
