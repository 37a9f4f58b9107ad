"""What a figure was measured on, and how fast that machine reads and multiplies just then."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import params
from aspire_jax.cli import allocator
from aspire_jax.loading import Model


def describe() -> dict[str, Any]:
    """Hardware and versions, for a result's header."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": jax.devices()[0].device_kind,
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "load": [round(x, 2) for x in os.getloadavg()],  # of the last 1, 5, 15 minutes: what else ran here
        "allocator": os.environ.get(allocator.VARIABLE),  # settings of glibc's
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in ("jax", "jaxlib", "numpy", "aspire-jax")},
        "time": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return None


def bytes_read(loaded: Model, work: Sequence[float]) -> float:
    """Bytes that steps of `work` [4] (see `costs.work`) read: the weights once a step, and the keys and values.

    As the step shapes count them: a copied block counts more than once, padding that is read counts too.
    """
    c = loaded.config
    width = np.dtype(jax.tree.leaves(loaded.params)[0].dtype).itemsize
    return (work[0] * params.count(c) + work[2] * 2 * c.n_layers * c.n_kv_heads * c.head_dim) * width


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
