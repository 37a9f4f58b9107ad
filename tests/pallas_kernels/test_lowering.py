"""Every kernel lowers for CUDA at production shapes, on either line of jax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk

from .cuda import lowered


def ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def lists(batch: int, pages: int) -> pk.PageLists:
    return pk.PageLists(ints(batch, pages), ints(batch, pages), ints(batch))


def kernels(text: str) -> list[str]:
    """Names of the Triton kernels a program calls."""
    return [part.split('name = "')[1].split('"')[0] for part in text.split("__gpu$xla.gpu.triton")[1:]]


# Query tokens a row, group, head_dim, page size, dtype, drafting.
ATTENTION = [
    (17, 4, 128, 16, "bfloat16", False),
    (1, 4, 128, 16, "bfloat16", True),
    (17, 2, 128, 16, "float16", False),
    (256, 8, 64, 16, "bfloat16", False),
    (5, 3, 96, 8, "float16", False),
    (1, 1, 256, 16, "float32", True),
    (17, 8, 256, 16, "bfloat16", False),
]


@pytest.mark.parametrize(("most", "group", "dim", "size", "dtype", "drafts"), ATTENTION)
def test_attention(most: int, group: int, dim: int, size: int, dtype: str, drafts: bool) -> None:
    batch, heads, pages, layers = 4, 8, 64, 36
    tokens = batch * most
    cache = floats(layers, heads, batch * pages, size, dim, dtype=dtype)
    near = [floats(tokens, heads, dim, dtype=dtype)] * 2
    tail = [floats(layers, heads, batch, 16, dim, dtype=dtype)] * 2
    new = pk.Tail(*near, *tail, ints(batch)) if drafts else pk.NewTokens(*near)
    call = functools.partial(pk.mixed_attention, max_queries=most, implementation="triton")
    rows = pk.QueryRows(ints(batch), ints(batch))
    text = lowered(
        call, floats(tokens, heads, group, dim, dtype=dtype), cache, cache, ints(), lists(batch, pages), rows, new
    )
    rows_of_tile = min(max(16, 1 << (most * group - 1).bit_length()), 128)
    assert kernels(text) == [f"attention_{rows_of_tile}", "combine_draft" if drafts else "combine_new"]


@pytest.mark.parametrize("heads", ["max", "mean", "kv"])
@pytest.mark.parametrize(("group", "dim", "size"), [(4, 128, 16), (3, 96, 5)])
def test_page_scores(heads: Any, group: int, dim: int, size: int) -> None:
    batch, kv_heads, pages, dtype = 4, 8, 100, jnp.bfloat16
    text = lowered(
        functools.partial(pk.page_scores, heads=heads, implementation="triton"),
        floats(batch, 2, kv_heads, group, dim, dtype=dtype),
        floats(batch, 2, kv_heads, group),
        floats(2, kv_heads, batch * pages, size, dim, dtype=dtype),
        ints(),
        lists(batch, pages),
    )
    assert kernels(text) == [f"page_scores_{heads}"]


def test_selection_and_write() -> None:
    choose = functools.partial(pk.select_pages, capacity=410, implementation="triton")
    assert kernels(lowered(choose, floats(4, 5853), ints(4))) == ["select_pages"]
    cache, new = floats(36, 8, 640, 16, 96, dtype=jnp.bfloat16), floats(36, 68, 8, 96, dtype=jnp.bfloat16)
    write = functools.partial(pk.write_pages, implementation="triton")
    text = lowered(write, cache, cache, new, new, ints(68), ints(68), donate_argnums=(0, 1))
    assert kernels(text) == ["write_pages"]
    assert text.count("output_operand_alias<") == 2  # in place
