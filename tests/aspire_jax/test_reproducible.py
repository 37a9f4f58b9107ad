"""Reproducible engines: tokens and margins equal plain decoding's to the last bit, whatever a step holds besides.

A margin is the difference of two logits of a token, so a logit that rounds otherwise almost always shows in it. The
truth is plain decoding of one request at a time; the others differ in method, slots, order, neighbours and refills.
Programs are compiled as users compile them: the compiler's optimisations are what could tell two engines apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng
from aspire_jax import methods, model, prefill, reproducible, step
from aspire_jax.attention.softmax import attend
from aspire_jax.config import ModelConfig
from aspire_jax.context import RefreshContext

from . import tiny
from .test_custom_policies import RandomDraftLength

CAPACITY, NEW = 1024, 20
# Contexts of one and two blocks of 512 keys; that of 503 grows across the cut, sometimes inside a verification.
PROMPTS = tiny.prompts((1, 2, 30, 503, 600, 505), seed=4)
NEWS = (NEW, NEW, 13, NEW, NEW, NEW)


def wide(c: ModelConfig) -> ModelConfig:
    return dataclasses.replace(c, max_length=2 * CAPACITY)


LLAMA, _, QWEN3 = (wide(c) for c in tiny.MODELS.values())
DEEP = wide(tiny.config(layers=3))
ANY_TABLE = {"unrolled": False, "consecutive": False}


def plain(c: ModelConfig, **fields: Any) -> eng.Engine:
    return tiny.make(c, **{"capacity": CAPACITY, "reproducible": True, "batch": 1} | fields)


def random(c: ModelConfig, **fields: Any) -> eng.Engine:
    """Every row tosses for its draft length, up to 5: they mix in all ways."""
    context = RefreshContext(k_min=3, recent=1, rho=0.1, renew=fields.pop("renew", "step"))
    fields = {"capacity": CAPACITY, "reproducible": True, "batch": 4} | fields
    return tiny.make(c, context, RandomDraftLength(d_max=5), **fields)


def aspire(c: ModelConfig, **fields: Any) -> eng.Engine:
    return tiny.aspire(
        c, **{"capacity": CAPACITY, "reproducible": True, "in_step": True, "renew": "verification"} | fields
    )


ENGINES = {
    "autoregressive, 4 longer slots": plain(LLAMA, batch=4, capacity=1536),
    "draft lengths 0 to 5, 4 slots, any table": random(LLAMA, consecutive=False),
    "aspire, qwen3, 3 slots": aspire(QWEN3, batch=3, d_max=3),
    "scanned, draft lengths 0 to 5, 4 slots": random(DEEP, **ANY_TABLE),
}


@pytest.fixture(scope="module", autouse=True)
def as_users_compile() -> Iterator[None]:
    jit = functools.partial(jax.jit, static_argnums=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "run", jit(step.run, donate_argnums=2))
        patch.setattr(tiny, "write_chunk", jit(prefill.prefill, donate_argnums=2))
        patch.setattr(tiny, "CHUNK", 64)
        yield


def bits(answers: list[tiny.Answer]) -> list[Any]:
    return [(a.tokens, a.reason, np.asarray(a.margins, np.float32).view(np.uint32).tolist()) for a in answers]


@functools.cache
def truth(c: ModelConfig, unrolled: bool) -> list[Any]:
    """Each request alone on the only slot."""
    engine = plain(c, unrolled=unrolled, consecutive=unrolled)
    return bits(tiny.serve(engine, [tiny.Request(p, n) for p, n in zip(PROMPTS, NEWS, strict=True)])[0])


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_bits_are_plain_decodings(engine: eng.Engine) -> None:
    """In two orders: other slots, other neighbours, other refills."""
    want, drafted, accepted = truth(engine.config, engine.unrolled), 0, 0
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 4, 1, 0, 2]):
        answers, state = tiny.serve(engine, [tiny.Request(PROMPTS[i], NEWS[i]) for i in order])
        assert bits(answers) == [want[i] for i in order]
        drafted += sum(a.drafted for a in answers)
        accepted += sum(a.accepted for a in answers)
    assert state.shape_steps.shape == (1,)
    if engine.d_max:
        assert 10 < accepted < drafted - 10


def test_free_widths_would_not_be_equal() -> None:
    """What the tests above would see if nothing were done: plain decoding of the same tokens in other bits."""
    engine = plain(LLAMA, batch=4, reproducible=False)
    answers, _ = tiny.serve(engine, [tiny.Request(p, n) for p, n in zip(PROMPTS, NEWS, strict=True)])
    got, want = bits(answers), truth(LLAMA, True)
    assert sum(a[0] == b[0] for a, b in zip(got, want, strict=True)) >= 5
    assert sum(a[2] != b[2] for a, b in zip(got, want, strict=True)) >= 3


def test_stops_and_limits() -> None:
    """A request that ends inside a run of accepted drafts leaves its neighbours and its successor alone."""
    engine, want = ENGINES["draft lengths 0 to 5, 4 slots, any table"], truth(LLAMA, True)
    for place in (2, 9):
        requests = [tiny.Request(PROMPTS[i], 1 + 7 * i % 20, (want[i][0][place],)) for i in (4, 3, 2, 1, 0, 5)]
        answers, _ = tiny.serve(engine, requests)
        for i, got in zip((4, 3, 2, 1, 0, 5), bits(answers), strict=True):
            n = len(got[0])
            assert n == min(want[i][0].index(want[i][0][place]) + 1, 1 + 7 * i % 20)
            assert (got[0], got[2]) == (want[i][0][:n], want[i][2][:n])


@pytest.mark.parametrize("outputs, inputs", [(61, 48), (96, 40), (151, 77), (640, 576)])
def test_a_product_treats_its_columns_alike(outputs: int, inputs: int) -> None:
    """The backend's property that reproducible engines rest on."""
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((outputs, inputs), inputs))
    rows, wanted = [], None
    for weight in (w, w.T.reshape(inputs, outputs)):
        layer = {"w_t": weight} if weight is w else {"w": weight}
        f = jax.jit(lambda layer, x: model.linear(layer, "w", x))
        for place in range(reproducible.WIDTH):
            others = rng.standard_normal((reproducible.WIDTH, inputs)).astype(np.float32)
            others[place] = x
            rows.append(np.asarray(f(layer, others))[place])
        wanted = rows[0]
        assert all(np.array_equal(r, wanted) for r in rows)
        rows.clear()


@pytest.mark.parametrize("heads, group, dim", [(3, 3, 64), (2, 1, 20), (4, 7, 128)])
def test_attention_treats_its_queries_alike(heads: int, group: int, dim: int) -> None:
    """Wherever a query stands in its tile, whatever the others see, and whatever lies behind what it sees itself."""
    rng, tile, block, seen = np.random.default_rng(1), max(1, 16 // group), 512, 300
    q = rng.standard_normal((heads, group, dim)).astype(np.float32)
    k, v = rng.standard_normal((2, heads, block, dim)).astype(np.float32)
    f, found = jax.jit(attend), []
    for place in range(tile):
        queries = 3 * rng.standard_normal((heads, tile, group, dim)).astype(np.float32)
        queries[:, place] = q
        limit = rng.integers(0, block, tile)
        limit[place] = seen
        k[:, seen:], v[:, seen:] = rng.standard_normal((2, heads, block - seen, dim))
        visible = np.repeat(np.arange(block)[None] < limit[:, None], group, axis=0)[None]
        part = f(jnp.asarray(queries.reshape(heads, tile * group, dim)), k, v, visible)
        found.append([np.asarray(x).reshape(heads, tile, group, -1)[:, place] for x in part])
    for part in found:
        assert all(np.array_equal(a, b) for a, b in zip(part, found[0], strict=True))


def test_capacity_is_whole_blocks() -> None:
    with pytest.raises(ValueError, match=r"capacity: 1000, expected whole blocks of 512 tokens \(reproducible\)"):
        plain(LLAMA, capacity=1000)


def test_kernels_are_refused() -> None:
    """They sum new tokens apart from committed ones."""
    with pytest.raises(ValueError, match="implementation: 'pallas', expected 'xla' where reproducible"):
        plain(LLAMA, implementation="pallas", unrolled=False)
    with pytest.raises(ValueError, match=r"cannot serve this engine: .*\(reproducible\)"):
        methods.configure(LLAMA, batch=1, capacity=9, max_new=2, implementation="pallas", reproducible=True)
    engine = methods.configure(LLAMA, batch=1, capacity=600, max_new=2, platform="gpu", reproducible=True)
    assert (engine.implementation, engine.capacity, engine.block) == ("xla", 1024, 512)
