"""Mixed-mode attention by the GPU kernels of `pallas_kernels`: the engine's rows in the kernels' terms.

Drafting and verifying rows are two calls of one kernel, so that a row of one query does not pay for the tile of a row
of many. The whole cache goes in with the layer's number, whether the layers are scanned or not: a slice would be a
copy. Selected pages are read where they lie; there is no compact copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from aspire_jax import cache as kv
from aspire_jax.attention.interface import Attention, ends
from aspire_jax.attention.softmax import Partial
from aspire_jax.config import ModelConfig
from aspire_jax.signals import outside_of

if TYPE_CHECKING:
    from aspire_jax.engine import Engine, State
    from aspire_jax.forward import Batch
    from aspire_jax.shapes import Shape

# What a tile holds and Triton compiles without spilling; see docs/gpu_kernels.md.
_MOST_GROUP, _MOST_DIM = 16, 256


def unserved(config: ModelConfig, platform: str, interpret: bool) -> str | None:
    """Why the kernels cannot serve a model on a platform, as a line; None where they can."""
    if not interpret and platform not in ("gpu", "cuda"):
        return f"the platform is {platform}, expected a CUDA GPU"
    if config.group > _MOST_GROUP:
        return f"{config.group} query heads share a KV head, expected at most {_MOST_GROUP}"
    if config.head_dim > _MOST_DIM:
        return f"head_dim is {config.head_dim}, expected at most {_MOST_DIM}"
    return None


class PallasAttention(Attention):
    """See `Attention`; engines with kernels are not instrumented.

    Attributes:
      cache: the cache, unchanged.
    """

    def __init__(self, engine: Engine, state: State, batch: Batch, shape: Shape) -> None:
        self.engine, self.state, self.batch, self.shape = engine, state, batch, shape
        self.cache = state.cache
        self.k, self.v = _stacked(state.cache.k, state.cache.v)
        acting = batch.queries > 0
        self.drafts, self.verifies = acting & batch.drafting, acting & ~batch.drafting
        length, size = state.slots.length, engine.page_size
        table = state.slots.table
        self.drafting_length = jnp.where(self.drafts, length, 0)
        self.whole_draft = pk.whole_table(table, self.drafting_length, size)
        self.whole_verify = pk.whole_table(table, jnp.where(self.verifies, length, 0), size)
        self.whole = pk.whole_table(table, jnp.where(acting, length, 0), size)
        if engine.d_max and shape.kind != "dense":
            self.selected = self.lists_of(state.selection)

    def lists_of(self, selection: jax.Array) -> pk.PageLists:
        """Page lists of drafting rows for every set of `selection` [n_sets, B, ...]."""

        def one(chosen: jax.Array) -> pk.PageLists:
            return pk.selected_pages(self.state.slots.table, chosen, self.drafting_length, self.engine.page_size)

        return jax.vmap(one)(selection)

    def drafting(
        self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, lists: pk.PageLists
    ) -> tuple[jax.Array, jax.Array]:
        """Drafting rows over `lists`, their tails and themselves."""
        tail, s = self.state.tail, self.state.slots
        near = pk.Tail(k, v, *_stacked(tail.k, tail.v), s.drafted)
        rows = pk.QueryRows(self.batch.first, self.drafts.astype(jnp.int32))
        return self._call(q, layer, lists, rows, near, 1)

    def verifying(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Verifying rows over their whole committed context and their new tokens."""
        rows = pk.QueryRows(self.batch.first, jnp.where(self.verifies, self.batch.queries, 0))
        return self._call(q, layer, self.whole_verify, rows, pk.NewTokens(k, v), self.shape.queries)

    def _call(self, q: jax.Array, layer: jax.Array, lists: Any, rows: Any, near: Any, most: int) -> Any:
        return pk.mixed_attention(
            q, self.k, self.v, layer, lists, rows, near, max_queries=most, implementation=self.engine.kernels
        )  # fmt: skip

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: int | jax.Array,
        set_index: Any,
        refresh: bool,
        served: Any,
    ) -> Partial:
        """See `Attention.attend`."""
        kind, layer = self.shape.kind, jnp.asarray(layer, jnp.int32)
        parts = []
        if kind != "draft":
            mine = ~self.batch.drafting[self.batch.row] & self.batch.valid
            parts.append((mine, self.verifying(q, k, v, layer)))
        if kind != "dense" and self.engine.d_max:
            if refresh:
                lists = self.whole_draft
            else:
                sets = self.selected if served is None else self.lists_of(served)
                lists = jax.tree.map(lambda x: x[set_index], sets)
            parts.append((self.batch.drafting[self.batch.row] & self.batch.valid, self.drafting(q, k, v, layer, lists)))
        return _joined(parts)

    def measure(
        self, q: jax.Array, part: Partial, layer: int | jax.Array, selection: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """See `Attention.measure`."""
        asked = jnp.minimum(ends(self.batch, self.shape), q.shape[0] - 1)

        def scores(heads: Any) -> jax.Array:
            return pk.page_scores(
                q[asked], part.top[asked], self.k, jnp.asarray(layer, jnp.int32), self.whole,
                heads=heads, implementation=self.engine.kernels,
            )  # fmt: skip

        mass = scores(self.engine.plan.heads)
        return mass, None if selection is None else outside_of(scores("mean")[:, None, None, None], selection, 1)


def _stacked(k: kv.Leaves, v: kv.Leaves) -> tuple[jax.Array, jax.Array]:
    """Both as one array over all layers, which is what an engine with kernels keeps."""
    assert isinstance(k, jax.Array)
    assert isinstance(v, jax.Array)
    return k, v


def _joined(parts: list[tuple[jax.Array, tuple[jax.Array, jax.Array]]]) -> Partial:
    """Each token's result from the call that computed it; zero where none did (a kernel leaves those undefined)."""
    out, lse = (jnp.zeros_like(x) for x in parts[0][1])
    for mine, (some_out, some_lse) in parts:
        out = jnp.where(mine[:, None, None, None], some_out, out)
        lse = jnp.where(mine[:, None, None], some_lse, lse)
    # Outputs come normalised: the log-sum-exp is the part's top, and its weights add up to one above it.
    return Partial(out, lse, jnp.ones_like(lse))


def chunk_attention(
    engine: Engine, state: State, q: jax.Array, k: jax.Array, v: jax.Array, layer: int | jax.Array,
    slot: jax.Array, start: jax.Array, count: jax.Array,
) -> jax.Array:  # fmt: skip
    """A chunk of a prompt over its slot's first `start` tokens and itself: [chunk, Hkv, G, D], zero behind `count`."""
    table = jax.lax.dynamic_index_in_dim(state.slots.table, slot)
    rows = pk.QueryRows(jnp.zeros((1,), jnp.int32), count[None])
    before = pk.whole_table(table, start[None], engine.page_size)
    out, _ = pk.mixed_attention(
        q, *_stacked(state.cache.k, state.cache.v), jnp.asarray(layer, jnp.int32), before, rows, pk.NewTokens(k, v),
        max_queries=q.shape[0], implementation=engine.kernels,
    )  # fmt: skip
    inside = jnp.arange(q.shape[0], dtype=jnp.int32) < count
    return jnp.where(inside[:, None, None, None], out, jnp.zeros_like(out))


def write(
    engine: Engine, k: kv.Leaves, v: kv.Leaves, new: tuple[Any, Any], page: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`cache.write` for keys and values together; leaves and new ones stacked."""
    return pk.write_pages(*_stacked(k, v), *new, page, offset, implementation=engine.kernels)
