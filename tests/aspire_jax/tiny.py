"""Tiny random models, the engine's pure functions jitted once, and the smallest host that serves requests with them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import engine as eng
from aspire_jax import model, observation, params, prefill, step, upkeep
from aspire_jax.config import ModelConfig
from aspire_jax.context import ContextPolicy, NoContext, RefreshContext
from aspire_jax.costs import CostModel
from aspire_jax.draft_length import AspireDraftLength, DraftLengthPolicy, NoDraft
from aspire_jax.sampling import rows as sampling_rows
from aspire_jax.sampling.rows import Settings, Support

VOCAB, PAGE, CHUNK = 61, 4, 8
# Logits of one token computed in two orders differ by less than this (float32, tiny models).
TIE = 2e-4


def config(family: str = "llama", layers: int = 2, heads: int = 3, kv: int = 1, **fields: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "family": family,
            "vocab_size": VOCAB,
            "d_model": 48,
            "n_layers": layers,
            "n_heads": heads,
            "n_kv_heads": kv,
            "head_dim": 16,
            "d_ff": 64,
            "norm_eps": 1e-5,
            "max_length": 512,
            "tie_embeddings": False,
            **fields,
        }
    )


MODELS = {
    "llama, group 3": config(),
    "qwen2, biases, tied, group 1": config("qwen2", heads=2, kv=2, qkv_bias=True, tie_embeddings=True),
    "qwen3, qk norm, group 2": config("qwen3", heads=4, kv=2, qk_norm=True, head_dim=20),
}


@functools.cache
def weights(c: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    """Random params whose biases and norms do something and whose attention decides what comes next."""
    drawn = params.random(c, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def stir(path: Any, x: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith(("bias", "norm")):
            return x + jnp.asarray(0.3 * rng.standard_normal(x.shape), jnp.float32)
        return x * np.float32({"qkv": 2.0, "o": 3.0}.get(name, 1.0))

    return jax.tree.map_with_path(lambda path, x: stir(path, x).astype(dtype), drawn)


@functools.cache
def unstacked(c: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    return params.unstack(weights(c, seed, dtype))


def params_of(engine: eng.Engine) -> Any:
    """What the engine reads: a list of layers where they are unrolled, stacked ones where they are scanned."""
    return (unstacked if engine.unrolled else weights)(engine.config, 0, jnp.dtype(engine.dtype))


# Most of a test's time is compilation. LLVM's optimisations are a third of it, and change nothing these tests look at.
_jit = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
init = _jit(eng.init)
run = _jit(step.run, donate_argnums=2)
write_chunk = _jit(prefill.prefill, donate_argnums=2)
admit = _jit(prefill.admit, donate_argnums=1)
observe = _jit(observation.observe_prompt, donate_argnums=2)

# Reads cost most, so that drafting pays.
COST = (0.1, 0.0, 1.0, 0.0)


def cost(*b: float) -> CostModel:
    return CostModel(jnp.asarray(b or COST, jnp.float32))


def make(
    c: ModelConfig, context: ContextPolicy | None = None, draft: DraftLengthPolicy | None = None, **fields: Any
) -> eng.Engine:
    """A small engine; plain decoding unless policies are given."""
    fields = {"batch": 4, "capacity": 64, "max_new": 24, "max_stop": 3, "page_size": PAGE} | fields
    return eng.Engine(config=c, context=context or NoContext(), draft_length=draft or NoDraft(), **fields)


def aspire(
    c: ModelConfig, *, in_step: bool, renew: str, d_max: int = 2, layers: tuple[int, ...] | None = None, **fields: Any
) -> eng.Engine:
    """ASPIRE that drafts much: a context so small that many drafts are wrong, a trusting estimator, no regret guard."""
    context = RefreshContext(k_min=3, recent=1, rho=0.1, renew=renew, layers=layers)  # type: ignore[arg-type]
    draft = AspireDraftLength(d_max=d_max, gamma_init=d_max, w=0.97, in_step=in_step, regret_share=None)
    return make(c, context, draft, mixed=not in_step, **fields)


@dataclasses.dataclass
class Request:
    prompt: Sequence[int]
    max_new: int = 24
    stop: tuple[int, ...] = ()
    settings: Settings | None = None


class Answer(NamedTuple):
    tokens: list[int]
    margins: list[float]
    reason: int
    steps: int
    drafted: int
    accepted: int
    verifications: int


Edit = Callable[[eng.State], eng.State]


def settings(support: Support, seed: int = 0, vocabulary: int = VOCAB, **fields: Any) -> Settings:
    """Settings of one request; `bias` and `seen` as [V] arrays."""
    plain = sampling_rows.greedy(support, vocabulary)
    given = {name: jnp.asarray(value, getattr(plain, name).dtype) for name, value in fields.items()}
    return plain.replace(key=jnp.asarray([0, seed], jnp.uint32), **given)


def shuffled_table(engine: eng.Engine, seed: int = 0) -> jax.Array:
    pages = np.random.default_rng(seed).permutation(engine.batch * engine.pages)
    return jnp.asarray(pages.reshape(engine.batch, engine.pages), jnp.int32)


def start(engine: eng.Engine, prices: CostModel | None = None, seed: int = 0) -> eng.State:
    """All slots free; page tables shuffled where the engine promises nothing about them."""
    state = init(engine, prices or cost())
    if not engine.consecutive:
        state = state.replace(slots=state.slots.replace(table=shuffled_table(engine, seed)))
    return state


def put(engine: eng.Engine, weights: Any, state: eng.State, slot: int, request: Request) -> eng.State:
    """Prefills and admits one request."""
    prompt = np.asarray(request.prompt, np.int32)
    for tokens, begin, count in prefill.chunks(prompt[:-1], CHUNK):
        state = write_chunk(
            engine, weights, state, jnp.int32(slot), jnp.asarray(tokens), jnp.int32(begin), jnp.int32(count)
        )
    stop = np.full(engine.max_stop, -1, np.int32)
    stop[: len(request.stop)] = request.stop
    state = admit(
        engine,
        state,
        jnp.int32(slot),
        jnp.int32(len(prompt) - 1),
        jnp.int32(prompt[-1]),
        jnp.int32(request.max_new),
        jnp.asarray(stop),
        request.settings,
    )
    if engine.plan.prompt_window:
        window, count = observation.window_of(prompt, engine.plan.prompt_window)
        state = observe(engine, weights, state, jnp.int32(slot), jnp.asarray(window), jnp.int32(count))
    return state


def selection(engine: eng.Engine, state: eng.State) -> np.ndarray:
    """What each row would read if it drafted now."""
    return np.asarray(upkeep.renew(engine, state, jnp.asarray(True)).selection)


def answer(state: eng.State, slot: int) -> Answer:
    s = state.slots
    n = int(s.emitted[slot])
    numbers = (s.reason, s.steps, s.drafted_total, s.accepted_total, s.verifications)
    tokens, margins = np.asarray(s.out[slot, :n]).tolist(), np.asarray(s.margin[slot, :n]).tolist()
    return Answer(tokens, margins, *(int(x[slot]) for x in numbers))


def serve(
    engine: eng.Engine,
    requests: Sequence[Request],
    *,
    slots: Sequence[int] | None = None,
    prices: CostModel | None = None,
    state: eng.State | None = None,
    burst: int = 1000,
    edit: Edit | None = None,
    most: int = 400,
    weights: Any = None,
) -> tuple[list[Answer], eng.State]:
    """Serves `requests` in order of arrival: a slot that finishes is refilled while the others go on.

    Args:
      slots: the slots to use; all of them unless told.
      burst: most steps between two looks of the host.
      edit: a change to the state before every burst.
      most: bursts after which a host that makes no progress gives up.
      weights: params, in place of the tiny model's random ones.
    """
    weights = params_of(engine) if weights is None else weights
    state = start(engine, prices) if state is None else state
    slots = range(engine.batch) if slots is None else slots
    waiting, holds, done = list(range(len(requests))), {}, {}
    for _ in range(most):
        for slot in slots:
            if slot in holds and not bool(state.slots.active[slot]):
                done[holds.pop(slot)] = answer(state, slot)
            if slot not in holds and waiting:
                holds[slot] = waiting.pop(0)
                state = put(engine, weights, state, slot, requests[holds[slot]])
        if not holds:
            return [done[i] for i in range(len(requests))], state
        if edit is not None:
            state = edit(state)
        finished = 0 if waiting else engine.batch
        state = run(engine, weights, state, jnp.int32(burst), jnp.int32(finished))
    raise AssertionError("the engine makes no progress")


_SEQUENCE = 96


@functools.partial(jax.jit, static_argnums=0)
def _next(c: ModelConfig, weights: Any, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    def one(tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.dense_logits(c, weights, tokens)[length - 1]
        best, index = jax.lax.top_k(logits, 2)
        return index[0], best[0] - best[1]

    return jax.vmap(one)(tokens, length)


def greedy(c: ModelConfig, prompts: Sequence[Sequence[int]], new: int, dtype: str = "float32") -> list[Answer]:
    """Greedy continuation by plain attention over the whole sequence, without a cache: the truth."""
    return _greedy(c, tuple(tuple(p) for p in prompts), new, dtype)


@functools.cache
def _greedy(c: ModelConfig, prompts: tuple[tuple[int, ...], ...], new: int, dtype: str) -> list[Answer]:
    tokens = np.zeros((len(prompts), _SEQUENCE), np.int32)
    length = np.array([len(p) for p in prompts], np.int32)
    margins = np.zeros((len(prompts), new))
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    for i in range(new):
        token, margin = _next(c, weights(c, 0, jnp.dtype(dtype)), jnp.asarray(tokens), jnp.asarray(length))
        tokens[np.arange(len(prompts)), length] = token
        margins[:, i] = margin
        length += 1
    return [
        Answer(row[n - new : n].tolist(), m.tolist(), eng.LENGTH, new, 0, 0, new)
        for row, n, m in zip(tokens, length, margins, strict=True)
    ]


def prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def assert_same(answers: Sequence[Answer], truth: Sequence[Answer]) -> None:
    """Same tokens as the truth's first ones; a difference is forgiven where the truth's two best logits tie."""
    for i, (got, want) in enumerate(zip(answers, truth, strict=True)):
        for place, (a, b, margin) in enumerate(zip(got.tokens, want.tokens, want.margins, strict=False)):
            if a != b:
                assert margin < TIE, f"request {i} differs at {place}: {got.tokens} for {want.tokens}, {margin=}"
                break
