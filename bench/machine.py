"""What a figure was measured on, and how fast that machine reads and multiplies just then."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


def describe() -> dict[str, Any]:
    """Hardware and versions, for a result's header."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return {
        "device": jax.devices()[0].device_kind,
        "cpu": name,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of `repeats` calls, each waited for; the first call is not counted."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds


def rates(repeats: int = 5) -> dict[str, float]:
    """Streaming reads (GB/s, a sum over 0.8 GB) and float32 matrix products (GFLOP/s, 2048 cubed); medians."""
    big = jnp.ones((200_000_000,), jnp.float32)
    read = statistics.median(timed(lambda: _total(big), repeats))
    square = jnp.ones((2048, 2048), jnp.float32)
    multiply = statistics.median(timed(lambda: _product(square), repeats))
    return {"read_gb_s": big.nbytes / read / 1e9, "matmul_gflop_s": 2 * 2048**3 / multiply / 1e9}


_total = jax.jit(jnp.sum)
_product = jax.jit(lambda x: x @ x)
