"""Which implementation of attention serves an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax

from aspire_jax.attention.pallas import unserved
from aspire_jax.config import ModelConfig


def choose(
    config: ModelConfig, implementation: str | None, platform: str | None, fields: Mapping[str, Any]
) -> Literal["xla", "pallas"]:
    """The implementation asked for, or the best there is.

    Args:
      implementation: None, "xla" or "pallas".
      platform: where the engine is to run; None: the default backend's.
      fields: fields of `Engine` that were given.

    Raises:
      ValueError: one was asked for that does not exist or cannot serve.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(f"implementation: {implementation!r}, expected None, 'xla' or 'pallas'")
    if implementation == "xla":
        return "xla"
    why = None
    if fields.get("reproducible"):
        why = "kernels merge new tokens apart from committed ones, which is not the same to the last bit (reproducible)"
    else:
        why = unserved(config, platform or jax.default_backend(), bool(fields.get("interpret")))
    if why is None and fields.get("unrolled"):
        why = "the kernels take a stacked cache (unrolled)"
    if why is None:
        return "pallas"
    if implementation == "pallas":
        raise ValueError(f"implementation: 'pallas' cannot serve this engine: {why}")
    return "xla"
