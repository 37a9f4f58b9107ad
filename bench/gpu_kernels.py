"""The kernels alone on a GPU: are they right, and what share of a copy's bandwidth do they read at?"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from bench.gpu_sizes import Sizes

# Weights meet values in the cache's dtype; everything else accumulates in float32.
TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 8e-4}
# Calls in one program, so that launching it costs nothing.
_CALLS = 16
_LAYERS = 2


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median time of `call`, which is warmed up first."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def copy_rate(sizes: Sizes) -> float:
    """GB/s of reading and writing, both counted."""
    x = jnp.zeros((sizes.copy // 4,), jnp.float32)
    add = jax.jit(lambda x: x + np.float32(1))
    return round(2 * x.nbytes / seconds(lambda: add(x), sizes.repeats) / 1e9, 1)


def _how(sizes: Sizes) -> pk.Implementation:
    return "interpret" if sizes.interpret else "triton"


def _cache(sizes: Sizes, batch: int, context: int, key: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values of two layers, so that none is found in the L2 cache, and a shuffled page table."""
    pages = context // sizes.page_size
    shape = (_LAYERS, sizes.heads, batch * pages, sizes.page_size, sizes.dim)
    make = jax.jit(lambda k: jax.random.normal(k, shape, jnp.dtype(sizes.dtype)))
    k, v = (make(x) for x in jax.random.split(jax.random.key(key)))
    table = np.random.default_rng(key).permutation(batch * pages).reshape(batch, pages)
    return k, v, jnp.asarray(table, jnp.int32)


def _queries(sizes: Sizes, batch: int, most: int, key: int) -> tuple[jax.Array, pk.NewTokens, pk.QueryRows]:
    shape = (batch * most, sizes.heads, sizes.group, sizes.dim)
    a, b, c = jax.random.split(jax.random.key(key), 3)
    dtype = jnp.dtype(sizes.dtype)
    q = jax.random.normal(a, shape, dtype)
    new = pk.NewTokens(*(jax.random.normal(x, (shape[0], sizes.heads, sizes.dim), dtype) for x in (b, c)))
    first = jnp.arange(batch, dtype=jnp.int32) * most
    return q, new, pk.QueryRows(first, jnp.full((batch,), most, jnp.int32))


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def _exact(q: Any, k: Any, v: Any, ids: np.ndarray, length: int, new: pk.NewTokens, most: int) -> np.ndarray:
    """Row 0 of a verification in float64: [most, Hkv, G, D]."""
    keys, values = (_wide(x[1][:, ids]).reshape(x.shape[1], -1, x.shape[-1])[:, :length] for x in (k, v))
    out = []
    for i in range(most):
        near = [
            np.concatenate([x, _wide(n[: i + 1]).swapaxes(0, 1)], axis=1) for x, n in ((keys, new.k), (values, new.v))
        ]
        scores = np.einsum("hgd,hsd->hgs", _wide(q[i]), near[0]) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(np.einsum("hgs,hsd->hgd", weights / weights.sum(-1, keepdims=True), near[1]))
    return np.stack(out)


def correctness(sizes: Sizes) -> list[dict[str, Any]]:
    """Relative errors of every kernel against float64 or its jnp twin."""
    batch, context = 4, min(sizes.attention[0][1], 2048)
    k, v, table = _cache(sizes, batch, context, 0)
    length = context - 3
    lists = pk.whole_table(table, jnp.full((batch,), length, jnp.int32), sizes.page_size)
    found = []

    def note(case: str, got: Any, want: np.ndarray, tolerance: float) -> None:
        error = float(np.linalg.norm(np.asarray(got, np.float64) - want)) / max(float(np.linalg.norm(want)), 1e-30)
        found.append({"case": case, "error": error, "tolerance": tolerance, "ok": error <= tolerance})

    layer, most = jnp.int32(1), 17
    q = lse = jnp.zeros(())
    for queries in (1, most):
        q, new, rows = _queries(sizes, batch, queries, 1)
        call = jax.jit(functools.partial(pk.mixed_attention, max_queries=queries, implementation=_how(sizes)))
        out, lse = call(q, k, v, layer, lists, rows, new)
        exact = _exact(q, k, v, np.asarray(table[0]), length, new, queries)
        note(f"attention, {queries} queries", out[:queries], exact, TOLERANCE[sizes.dtype])
    ends = jnp.stack([q.reshape(batch, most, *q.shape[1:])[:, i] for i in (0, most - 1)], axis=1)
    ends_lse = jnp.stack([lse.reshape(batch, most, *lse.shape[1:])[:, i] for i in (0, most - 1)], axis=1)
    for heads in ("max", "mean", "kv"):
        kernel, twin = (
            jax.jit(functools.partial(pk.page_scores, heads=heads, implementation=how))(ends, ends_lse, k, layer, lists)
            for how in (_how(sizes), "xla")
        )
        note(f"page scores, {heads}", kernel, np.asarray(twin, np.float64), 1e-3)
    pages = table.shape[1]
    wanted = max(2, pages // 14)
    args = (jax.random.uniform(jax.random.key(3), (batch, pages)), jnp.full((batch,), wanted, jnp.int32))
    chosen, twin = (
        np.sort(jax.jit(functools.partial(pk.select_pages, capacity=wanted, implementation=how))(*args), 1)
        for how in (_how(sizes), "xla")
    )
    note("selection", chosen, twin.astype(np.float64), 0.0)
    new_k = jnp.ones((_LAYERS, batch, sizes.heads, sizes.dim), k.dtype)
    places = (jnp.arange(batch, dtype=jnp.int32), jnp.zeros((batch,), jnp.int32))
    kernel, twin = (
        jax.jit(functools.partial(pk.write_pages, implementation=how))(k, v, new_k, new_k, *places)[0]
        for how in (_how(sizes), "xla")
    )
    note("write", jnp.max(jnp.abs(kernel - twin)), np.zeros(()), 0.0)
    return found


def bandwidth(sizes: Sizes, copy: float) -> list[dict[str, Any]]:
    """Attention over whole tables, with one query and with many, and over selected pages: times, shares of `copy`."""
    found = []
    for batch, context in sizes.attention:
        k, v, table = _cache(sizes, batch, context, 2)
        lengths = jnp.full((batch,), context, jnp.int32)
        whole = pk.whole_table(table, lengths, sizes.page_size)
        pages = table.shape[1]
        chosen = max(1, round(0.07 * pages))
        rng = np.random.default_rng(4)
        selection = np.stack([rng.permutation(pages)[:chosen] for _ in range(batch)])
        some = pk.selected_pages(table, jnp.asarray(selection, jnp.int32), lengths, sizes.page_size)
        for kind, lists, most in (("plain", whole, 1), ("verify", whole, 17), ("draft", some, 1)):
            q, new, rows = _queries(sizes, batch, most, 5)
            near: Any = new
            if kind == "draft":
                tail = jnp.zeros((_LAYERS, sizes.heads, batch, 16, sizes.dim), k.dtype)
                near = pk.Tail(*new, tail, tail, jnp.full((batch,), 4, jnp.int32))
            once = functools.partial(pk.mixed_attention, max_queries=most, implementation=_how(sizes))

            @jax.jit
            def many(q: jax.Array, k: Any, v: Any, lists: Any, rows: Any, near: Any, once: Any = once) -> jax.Array:
                def turn(i: jax.Array, q: jax.Array) -> jax.Array:
                    out, _ = once(q, k, v, (i % _LAYERS).astype(jnp.int32), lists, rows, near)
                    return q + np.float32(1e-3) * out if q.dtype == out.dtype else out.astype(q.dtype)

                return jax.lax.fori_loop(0, _CALLS, turn, q)

            each = seconds(lambda a=(q, k, v, lists, rows, near), many=many: many(*a), sizes.repeats) / _CALLS  # type: ignore[misc]
            entries = pages if lists is whole else chosen
            read = 2 * batch * entries * sizes.page_size * sizes.heads * sizes.dim * k.dtype.itemsize
            rate = read / each / 1e9
            what = {"case": f"{kind}: {batch} x {context}", "kind": kind, "context": context}
            found.append({**what, "microseconds": each * 1e6, "gb_s": rate, "share_of_copy": rate / copy})
    return found
