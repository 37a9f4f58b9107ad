"""Lowering for an H200 without one: what Triton's front end refuses, it refuses here."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh


def _device() -> Any:
    """From jax 0.11 on the lowering asks which GPU it is for."""
    try:
        from jax.sharding import AbstractDevice
    except ImportError:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lowered(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """StableHLO of `function` for CUDA."""
    with _device(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        traced = jax.jit(function, **options).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
