"""The family of context policies that `bench.context_search` searches, and decoding behind one prefill with each.

Compiling a policy takes as long as measuring it. So the shares and the budget of a blend are data here, and steps come
in two shapes only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import engine as engine_lib
from aspire_jax import methods, observation, prefill, step
from aspire_jax.cache import KVCache
from aspire_jax.config import ModelConfig
from aspire_jax.context import (
    BlendContext,
    ContextPolicy,
    RefreshContext,
    Room,
    Scores,
    SnapKVContext,
    StreamingContext,
    VegasContext,
)
from aspire_jax.context.blend import BlendMass
from aspire_jax.costs import TERMS, CostModel
from aspire_jax.draft_length import FixedDraftLength
from aspire_jax.engine import Engine, State
from aspire_jax.loading import Model
from aspire_jax.request import Prepared
from aspire_jax.shapes import Shape, Shapes
from bench import novelty

DRAFTS = 16
# A verification's accepted drafts, and whether it met new text.
Verification = tuple[int, bool]


@flax.struct.dataclass
class Knobs:
    """What `Tuned` has as data: scores, and scalars `own`, `window` and `tokens` (the budget)."""

    scores: BlendMass
    own: jax.Array
    window: jax.Array
    tokens: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned(BlendContext):
    """A blend whose shares and budget (at most `least`) are in its state: one compilation for all of them."""

    def init(self, config: ModelConfig, batch: int, room: Room) -> Any:
        numbers = (jnp.float32(self.own), jnp.float32(self.window), jnp.int32(self.least))
        return Knobs(super().init(config, batch, room), *numbers)

    def observe(self, state: Any, scores: Scores) -> Any:
        return dataclasses.replace(state, scores=super().observe(state.scores, scores))

    def select(self, state: Any, lengths: jax.Array, room: Room) -> jax.Array:
        tokens = jnp.broadcast_to(state.tokens, lengths.shape)
        return self.choose(state.scores.mass, lengths, room, tokens, state.own, state.window)

    def forget(self, state: Any, rows: jax.Array) -> Any:
        return dataclasses.replace(state, scores=super().forget(state.scores, rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleTokens(VegasContext):
    """Vegas as in the original: its pages are single tokens."""


def page_size(context: ContextPolicy) -> int:
    """Tokens of a page under a policy."""
    return 1 if isinstance(context, SingleTokens) else 16


def baselines(budget: int) -> dict[str, ContextPolicy]:
    """What the search has to beat, all reading `budget` tokens; the first is the paper's."""
    pages = budget // 16
    return {
        "refresh layer N-2": RefreshContext(rho=0.0, k_min=pages, recent=min(8, pages), renew="step"),
        "streaming": StreamingContext(budget=budget),
        "snapkv": SnapKVContext(budget=budget),
        "vegas": VegasContext(rho=0.0, least=budget),
        "vegas, single tokens": SingleTokens(rho=0.0, least=budget),
    }


class _TwoShapes(Shapes):
    """A draft and a full verification: all that rows in step with one draft length take."""

    @property
    def all(self) -> tuple[Shape, ...]:
        most = self.d_max + 1
        return Shape("draft", self.batch, 1), Shape("dense", self.batch * most, most)


class _Engine(Engine):
    """An engine of two shapes."""

    @property
    def shapes(self) -> Shapes:
        whole = super().shapes
        return _TwoShapes(**{f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)})


def _without_cache(engine: Engine, cost: CostModel) -> State:
    return dataclasses.replace(engine_lib.init(engine, cost), cache=KVCache((), ()))


_init = jax.jit(engine_lib.init, static_argnums=0)
_blank = jax.jit(_without_cache, static_argnums=0)
_prefill = jax.jit(prefill.prefill, static_argnums=0, donate_argnums=2)
_admit = jax.jit(prefill.admit, static_argnums=0, donate_argnums=1)
_observe = jax.jit(observation.observe_prompt, static_argnums=0, donate_argnums=2)
_run = jax.jit(step.run, static_argnums=0, donate_argnums=2)


class Group:
    """Prompts whose keys and values are in a cache, behind which policies decode in turns.

    Attributes:
      differing: answers of any policy so far that were not the first one's.
    """

    def __init__(self, loaded: Model, requests: Sequence[Prepared], capacity: int) -> None:
        self.loaded, self.requests, self.capacity = loaded, requests, capacity
        self.cost = CostModel(jnp.ones((TERMS,), jnp.float32))
        self.answers: np.ndarray | None = None
        self.differing = 0
        engine = self.engine(RefreshContext())
        state = _init(engine, self.cost)
        for slot, request in enumerate(requests):
            for tokens, start, count in prefill.chunks(request.tokens[:-1], 256):
                place = (np.int32(slot), tokens, np.int32(start), np.int32(count))
                state = _prefill(engine, loaded.params, state, *place)
        self.cache = state.cache

    def engine(self, context: ContextPolicy, drafts: int = DRAFTS, size: int | None = None) -> Engine:
        """An engine of two shapes that drafts so many tokens by `context`, on pages of `size` tokens."""
        made = methods.configure(
            self.loaded.config,
            methods.Method(context, FixedDraftLength(gamma=drafts)),
            batch=len(self.requests),
            capacity=self.capacity,
            max_new=self.requests[0].max_new,
            dtype=self.loaded.dtype,
            page_size=page_size(context) if size is None else size,
        )
        return _Engine(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)})

    def _cut(self, size: int) -> None:
        """Cuts the cache into pages of `size` tokens, leaf by leaf, so that only one is held twice."""
        leaves, tree = jax.tree.flatten(self.cache)
        self.cache = KVCache((), ())
        for i, pages in enumerate(leaves):
            if pages.shape[2] != size:
                leaves[i] = pages.reshape(pages.shape[0], -1, size, pages.shape[3])
        self.cache = jax.tree.unflatten(tree, leaves)

    def decode(self, context: ContextPolicy, drafts: int = DRAFTS, size: int | None = None) -> list[list[Verification]]:
        """Of each prompt, its verifications that held all drafts; arguments as for `engine`."""
        knobs: dict[str, Any] = {}
        if isinstance(context, Tuned):
            values = {"own": np.float32(context.own), "window": np.float32(context.window)}
            knobs = {**values, "tokens": np.int32(context.least)}
            # What is left is what a program is compiled for.
            context = dataclasses.replace(context, own=0.5, window=0.125, least=max(512, context.least))
        engine, params = self.engine(context, drafts, size), self.loaded.params
        self._cut(engine.page_size)
        state = dataclasses.replace(_blank(engine, self.cost), cache=self.cache)
        if knobs:
            state = dataclasses.replace(state, context=dataclasses.replace(state.context, **knobs))
        never = np.full((engine.max_stop,), -1, np.int32)
        for slot, request in enumerate(self.requests):
            length, row = np.int32(len(request.tokens) - 1), np.int32(slot)
            state = _admit(engine, state, row, length, request.tokens[-1], np.int32(request.max_new), never)
            if engine.plan.prompt_window:
                window, count = observation.window_of(request.tokens, engine.plan.prompt_window)
                state = _observe(engine, params, state, row, window, np.int32(count))
        state = _run(engine, params, state, np.int32(1 << 20), np.int32(engine.batch))
        self.cache = state.cache
        out, held = np.array(state.slots.out), np.array(state.slots.held)
        self.answers = out if self.answers is None else self.answers
        self.differing += int(np.sum(np.any(out != self.answers, axis=1)))
        rows = zip(out, held, self.requests, strict=True)
        return [verifications(tokens[: r.max_new], held[: r.max_new], drafts) for tokens, held, r in rows]


def verifications(tokens: np.ndarray, held: np.ndarray, drafts: int = DRAFTS) -> list[Verification]:
    """An answer's verifications that held all drafts; `held` as in the slots. The last may have been cut short."""
    first = np.flatnonzero(held >= 0)
    emitted = np.diff(first)
    places = novelty.novel(tokens.tolist())
    pairs = zip(first[:-1], emitted, strict=True)
    return [(int(n) - 1, bool(places[i])) for i, n in pairs if held[i] == drafts]


def summary(found: Sequence[Sequence[Verification]]) -> dict[str, Any]:
    """Mean accepted length of all and of novel verifications, with standard errors over prompts (bootstrap)."""
    out: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    for name, only_novel in (("all", False), ("novel", True)):
        kept = [[a for a, novel in row if novel or not only_novel] for row in found]
        sums = np.array([[sum(row), len(row)] for row in kept])
        drawn = sums[rng.integers(0, len(sums), (2000, len(sums)))].sum(axis=1)
        total, count = sums.sum(axis=0)
        out[name] = {
            "mean": float(total / max(count, 1)),
            "standard_error": float(np.std(drawn[:, 0] / np.maximum(drawn[:, 1], 1))),
            "verifications": int(count),
            "by_prompt": sums.tolist(),
        }
    return out


def ratio(found: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    """Novel mean accepted length against a reference's on the same prompts: value, 95 % interval (bootstrap)."""
    x, y = (np.array(r["novel"]["by_prompt"], float) for r in (found, reference))
    rows = np.random.default_rng(0).integers(0, len(x), (2000, len(x)))

    def mean(v: np.ndarray) -> Any:
        return v[..., 0].sum(axis=-1) / np.maximum(v[..., 1].sum(axis=-1), 1)

    drawn = mean(x[rows]) / np.maximum(mean(y[rows]), 1e-9)
    return [float(mean(x) / max(mean(y), 1e-9)), *(float(v) for v in np.percentile(drawn, [2.5, 97.5]))]
