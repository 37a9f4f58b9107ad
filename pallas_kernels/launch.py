"""How a kernel is launched: one place for what differs between jax versions, and for the sizes a launch is cut into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

Implementation = Literal["triton", "interpret", "xla"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("triton", "interpret", "xla")

# Finite, so that a part with no key at all merges as weight zero instead of as NaN.
MASKED = np.float32(-1e30)
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
# Rows of the smallest tile a tensor core multiplies.
LEAST_ROWS = 16


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(value - 1, 0).bit_length()


def ceil_div(a: Any, b: int) -> Any:
    """`a` / `b`, rounded up; for non-negative integers and arrays of them."""
    return (a + (b - 1)) // b


def call(
    kernel: Callable[..., None],
    out_shape: Any,
    grid: tuple[int, ...],
    *args: jax.Array,
    implementation: Implementation,
    name: str,
    warps: int = 4,
    stages: int = 1,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Runs `kernel` over `grid` with every array as a whole: kernels here compute their own addresses.

    `compiler_params` are always given, because the default backend differs between jax versions.
    """
    if any(n == 0 for n in grid):
        raise ValueError(f"{name}: grid {grid}, expected no empty axis")
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        in_specs=[pl.no_block_spec] * len(args),
        out_specs=jax.tree.map(lambda _: pl.no_block_spec, out_shape),
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=implementation == "interpret",
        name=name,
    )(*args)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a` [M, K] times `b` [K, N], accumulated in float32; float32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == np.float32 else None
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=np.float32)
