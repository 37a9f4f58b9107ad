"""The mixed forward: drafting and verifying rows side by side through the same layers.

Reads the cache as the last step left it and treats this step's keys and values as a further part of the softmax; they
are written once, by the caller, after the last layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import cache as kv
from aspire_jax import instrument, model, signals
from aspire_jax.attention import reproducible as exact
from aspire_jax.attention import xla
from aspire_jax.attention.pallas import PallasAttention
from aspire_jax.attention.softmax import Partial, attend, log_sum_exp, merge, normalise, nothing
from aspire_jax.context import Scores
from aspire_jax.engine import Engine, State
from aspire_jax.params import Params
from aspire_jax.shapes import Shape


class Batch(NamedTuple):
    """The step's tokens, packed.

    Attributes:
      drafting: [B] bool; queries: [B] query tokens of each row, 0 where idle.
      row, query: [T] each token's row, and its number among the row's query tokens.
      first: [B] packed index of a row's first token.
      valid: [T] bool, false for padding.
      token, position: [T].
    """

    drafting: jax.Array
    queries: jax.Array
    row: jax.Array
    query: jax.Array
    first: jax.Array
    valid: jax.Array
    token: jax.Array
    position: jax.Array


class Forward(NamedTuple):
    """What the layers produced.

    Attributes:
      x: [T, d_model] residual stream after the last layer.
      k, v: the tokens' keys and values, per layer [T, Hkv, D] (stacked where layers are scanned).
      scores: page scores at the plan's layers, or None where the plan measures none in such a step. Of an instrumented
        verification those of all its queries apart, on an axis behind B (see `instrument`).
      outside: [B] for drafting rows, see `Signals`; None where the policy does not ask or no layer measures it.
      recall: [B, d_max], see `Outcome`; None unless this is an instrumented verification.
      context: the context policy's state (changed where selections are served within the step).
      selection: as in the state.
    """

    x: jax.Array
    k: kv.Leaves
    v: kv.Leaves
    scores: Scores | None
    outside: jax.Array | None
    recall: jax.Array | None
    context: Any
    selection: jax.Array


def pack(engine: Engine, state: State, drafting: jax.Array, queries: jax.Array, shape: Shape) -> Batch:
    """Lays the rows' query tokens side by side: a draft's last token, a verification's pending token and drafts."""
    s, b = state.slots, engine.batch
    if shape.kind == "packed":
        ends = jnp.cumsum(queries)
        index = jnp.arange(shape.tokens, dtype=jnp.int32)
        row = jnp.sum(index[:, None] >= ends[None, :], axis=1).astype(jnp.int32)
        valid, row = row < b, jnp.minimum(row, b - 1)
        first = (ends - queries).astype(jnp.int32)
        query = jnp.where(valid, index - first[row], 0)
    else:
        row = jnp.repeat(jnp.arange(b, dtype=jnp.int32), shape.queries, total_repeat_length=shape.tokens)
        first = jnp.arange(b, dtype=jnp.int32) * shape.queries
        query = jnp.arange(shape.tokens, dtype=jnp.int32) - first[row]
        valid = query < queries[row]
    tokens = jnp.concatenate([s.pending[:, None], s.drafts], axis=1)  # [B, d_max + 1]
    place = jnp.where(drafting[row], s.drafted[row], jnp.minimum(query, engine.d_max))
    return Batch(drafting, queries, row, query, first, valid, tokens[row, place], s.length[row] + place)


def page_mass(weights: jax.Array, heads: str, page_size: int) -> jax.Array:
    """Page scores from token weights [B, Q, Hkv, G, S]: heads combined, summed over each page, mean of the queries.

    Returns [B, P], or [B, Hkv, P] for `heads` "kv".
    """
    token = {
        "max": lambda w: jnp.max(w, axis=(2, 3)),
        "mean": lambda w: jnp.mean(w, axis=(2, 3)),
        "kv": lambda w: jnp.mean(w, axis=3),
    }[heads](weights)
    pages = token.reshape(*token.shape[:-1], -1, page_size).sum(axis=-1)
    return jnp.mean(pages, axis=1)


_New = tuple[jax.Array, jax.Array, jax.Array]
_Pages = tuple[jax.Array, jax.Array]


class _Attention:
    """Attention of one step: what is the same for all layers is computed once, here."""

    def __init__(self, engine: Engine, state: State, batch: Batch, shape: Shape) -> None:
        self.engine, self.state, self.batch, self.shape = engine, state, batch, shape
        self.cache = state.cache
        self.instrumented = engine.instrumented and shape.kind != "draft"
        s = state.slots
        self.lengths = jnp.where(batch.queries > 0, s.length, 0)
        slot = jnp.arange(engine.d_max, dtype=jnp.int32)[None]
        self.tail_now = slot == s.drafted[:, None]  # [B, tail] where this step's draft token goes
        self.tail_seen = slot <= s.drafted[:, None]
        self.seen: xla.Seen | None = None  # of the layer attended to last, where it is measured
        if shape.kind == "packed":
            causal = (batch.query[:, None] >= batch.query[None, :]) & (batch.row[:, None] == batch.row[None, :])
            verifying = ~batch.drafting[batch.row] & batch.valid
            self.new_seen = causal & verifying[None, :] & verifying[:, None]
            most = engine.batch + shape.tokens // engine.tile
            self.tiles = [
                xla.tile(jnp.where(skip, 0, batch.queries), self.lengths, engine.tile, most)
                for skip in (batch.drafting, jnp.zeros_like(batch.drafting))
            ]

    def page_visible(self, selection: jax.Array) -> jax.Array:
        """Committed tokens of the selected pages [B, k * page_size], or [B, Hkv, k * page_size] as the selection."""
        size, length = self.engine.page_size, self.state.slots.length
        place = jax.lax.broadcasted_iota(jnp.int32, (*selection.shape, size), selection.ndim)
        position = selection[..., None] * size + place
        seen = (selection >= 0)[..., None] & (position < length.reshape(-1, *(1,) * selection.ndim))
        return seen.reshape(*selection.shape[:-1], -1)

    def sparse(self, q: jax.Array, layer: int | jax.Array, served: jax.Array | None, set_index: Any) -> Partial:
        """Drafting rows over their selected pages. q: [B, Hkv, G, D]. `served`: a selection made in this step."""
        state = self.state
        if served is None:
            selection = state.selection[set_index]
            k, v = kv.leaf(state.compact.k, layer), kv.leaf(state.compact.v, layer)
        else:
            selection = served[set_index]
            k, v = (
                kv.selected_view(kv.leaf(x, layer), state.slots.table, selection) for x in (self.cache.k, self.cache.v)
            )
        return xla.over_context(q, k, v, self.page_visible(selection))

    def recent(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: int | jax.Array) -> Partial:
        """Drafting rows over their tail and themselves. q: [B, Hkv, G, D]; k, v: [B, Hkv, D]."""
        now = self.tail_now[None, :, :, None]
        tails = (kv.leaf(self.state.tail.k, layer), kv.leaf(self.state.tail.v, layer))
        tk, tv = (jnp.where(now, new.swapaxes(0, 1)[:, :, None], old) for new, old in zip((k, v), tails, strict=True))
        return xla.over_context(q, tk, tv, self.tail_seen)

    def whole(self, q: jax.Array, layer: int | jax.Array) -> Partial:
        """Rows of equal query count over their whole committed context. q: [B, Q, Hkv, G, D]."""
        c, s = self.cache, self.state.slots
        k, v = kv.leaf(c.k, layer), kv.leaf(c.v, layer)
        return xla.over_rows(q, k, v, s.table, self.lengths, self.engine.consecutive)

    def whole_measured(self, q: jax.Array, layer: int | jax.Array) -> Partial:
        """As `whole`; keeps what `measure` asks for next, where it does."""
        measured = isinstance(layer, int) and layer in self.engine.plan.verify_layers and self.engine.d_max
        if not measured or self.instrumented:
            return self.whole(q, layer)
        c, s = self.cache, self.state.slots
        k, v = kv.leaf(c.k, layer), kv.leaf(c.v, layer)
        last = jnp.clip(self.batch.queries - 1, 0, q.shape[1] - 1)
        part, self.seen = xla.over_rows_keeping(q, k, v, s.table, self.lengths, self.engine.consecutive, last)
        return part

    def among_new(self, q: jax.Array, k: jax.Array, v: jax.Array) -> Partial:
        """Equal rows' new tokens among themselves. q: [B, Q, Hkv, G, D]; k, v: [B, Q, Hkv, D]."""
        queries = q.shape[1]
        causal = jnp.tril(jnp.ones((queries, queries), bool))
        causal = jnp.repeat(causal, q.shape[3], axis=0, total_repeat_length=queries * q.shape[3])
        part = attend(xla.heads_first(q), k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3), causal[None, None])
        return xla.rows_first(part, queries)

    def packed(
        self, q: jax.Array, k: jax.Array, v: jax.Array, layer: int | jax.Array, with_drafts: bool
    ) -> tuple[Partial, Partial]:
        """Packed rows over their whole committed context, and over new tokens. q: [T, Hkv, G, D]; k, v: [T, Hkv, D]."""
        b, e = self.batch, self.engine
        tiles = self.tiles[int(with_drafts)]
        index = b.first[tiles.row] + tiles.first
        index = jnp.clip(index[:, None] + jnp.arange(e.tile, dtype=jnp.int32)[None], 0, q.shape[0] - 1)
        pages_k, pages_v = kv.leaf(self.cache.k, layer), kv.leaf(self.cache.v, layer)
        new = (q, k, v)
        part, near, (pages_k, pages_v) = self.over_tiles(q[index], new, (pages_k, pages_v), tiles)
        if isinstance(layer, int):
            cache = self.cache
            self.cache = kv.KVCache(kv.replaced(cache.k, layer, pages_k), kv.replaced(cache.v, layer, pages_v))
        of_token = jnp.minimum(tiles.of_row[b.row] + b.query // e.tile, tiles.row.shape[0] - 1)
        return Partial(*(x[of_token, b.query % e.tile] for x in part)), near

    def over_tiles(self, q: jax.Array, new: _New, pages: _Pages, tiles: xla.Tiles) -> tuple[Partial, Partial, _Pages]:
        """Tiles of queries `q` [N, tile, Hkv, G, D] over the cache, and all queries over the keys it does not hold.

        Args:
          new: queries, keys and values of the packed tokens; pages: one layer's keys and values.

        Returns:
          Partials over [N, tile, Hkv, G] and over [T, Hkv, G], and the pages (see `xla.over_tiles`).
        """
        e, (k, v) = self.engine, pages
        far, k, v = xla.over_tiles(q, k, v, self.state.slots.table, tiles, e.block, e.consecutive)
        return far, xla.over_new(*new, self.new_seen), (k, v)

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
        """All packed tokens' attention in one layer, unnormalised. q: [T, Hkv, G, D]; k, v: [T, Hkv, D]."""
        e, b = self.engine, self.batch
        if self.shape.kind == "draft":
            near = self.recent(q, k, v, layer)
            if refresh:
                far = Partial(*(x[:, 0] for x in self.whole(q[:, None], layer)))
            else:
                far = self.sparse(q, layer, served, set_index)
            return merge(far, near)
        if self.shape.kind == "dense":
            rows = (e.batch, self.shape.queries)
            qr, kr, vr = (x.reshape(*rows, *x.shape[1:]) for x in (q, k, v))
            part = merge(self.whole_measured(qr, layer), self.among_new(qr, kr, vr))
            return Partial(*(x.reshape(-1, *x.shape[2:]) for x in part))
        far, near = self.packed(q, k, v, layer, refresh)
        if not e.d_max:
            return merge(far, near)
        qd, kd, vd = q[b.first], k[b.first], v[b.first]
        far_draft = self.sparse(qd, layer, served, set_index) if not refresh else None
        near_draft = self.recent(qd, kd, vd, layer)
        pick = b.drafting[b.row]

        def choose(drafts: Partial, verifies: Partial) -> Partial:
            def where(x: jax.Array, y: jax.Array) -> jax.Array:
                return jnp.where(pick.reshape(-1, *(1,) * (y.ndim - 1)), x[b.row], y)

            return Partial(*(where(x, y) for x, y in zip(drafts, verifies, strict=True)))

        if far_draft is not None:
            far = choose(far_draft, far)
        return merge(far, choose(near_draft, near))

    def measure(
        self, q: jax.Array, part: Partial, layer: int | jax.Array, selection: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Every acting row's attention to its committed tokens, by its first and its last query token.

        Args:
          q: [T, Hkv, G, D]; part: over [T, Hkv, G].
          selection: see `signals.outside_of`; None where nobody asks.

        Returns:
          Page scores (see `Scores.mass`, one layer's; of an instrumented verification those of all queries apart, on an
          axis behind B), and the attention outside the selection [B].
        """
        b, heads, size = self.batch, self.engine.plan.heads, self.engine.page_size
        if self.instrumented:
            weights = self.all_weights(q, part, layer)
            pages = jax.vmap(lambda w: page_mass(w[:, None], heads, size), in_axes=1, out_axes=1)(weights)
            weights = weights[:, :1]  # a drafting row's only query
        else:
            last = b.first + jnp.maximum(b.queries - 1, 0)
            ends = jnp.stack([b.first, last], axis=1) if self.shape.kind != "draft" else b.first[:, None]
            if self.seen is not None:
                weights, self.seen = self.seen.of(log_sum_exp(part)[jnp.minimum(ends, q.shape[0] - 1)]), None
            else:
                weights = self.weights(q, part, layer, ends)
            pages = page_mass(weights, heads, size)
        return pages, None if selection is None else signals.outside_of(weights, selection, size)

    def weights(self, q: jax.Array, part: Partial, layer: int | jax.Array, queries: jax.Array) -> jax.Array:
        """Softmax weights [B, Q, Hkv, G, S] of committed tokens, by the packed tokens `queries` [B, Q]."""
        queries = jnp.minimum(queries, q.shape[0] - 1)
        return xla.weights_of(
            q[queries], log_sum_exp(part)[queries], kv.leaf(self.cache.k, layer), self.state.slots.table, self.lengths,
            self.engine.consecutive,
        )  # fmt: skip

    def all_weights(self, q: jax.Array, part: Partial, layer: int | jax.Array) -> jax.Array:
        """The weights of every query token that a row may have."""
        return self.weights(
            q, part, layer, self.batch.first[:, None] + jnp.arange(self.shape.queries, dtype=jnp.int32)[None]
        )

    def recall(self, q: jax.Array, part: Partial, layer: int | jax.Array, set_index: Any) -> jax.Array:
        """One layer's recall [B, d_max] of the drafts' selections."""
        return instrument.recall(self.engine, self.state, self.all_weights(q, part, layer), set_index)


class _ReproducibleAttention(_Attention):
    """Every step is packed, and a query meets committed and new tokens in the same blocks."""

    def over_tiles(self, q: jax.Array, new: _New, pages: _Pages, tiles: xla.Tiles) -> tuple[Partial, Partial, _Pages]:
        e, b = self.engine, self.batch
        queries, new_k, new_v = new
        own = exact.new_tokens(new_k, new_v, b.first, jnp.where(b.drafting, 0, b.queries), e.d_max + 1)
        k, v = pages
        far, k, v = exact.over_tiles(q, k, v, own, self.state.slots.table, tiles, e.block, e.consecutive)
        return far, nothing(queries), (k, v)


# How attention is computed. Each is made for one step and has `cache`, `attend` and `measure`.
_ATTENTION: dict[str, type[_Attention] | type[PallasAttention]] = {
    "xla": _Attention,
    "pallas": PallasAttention,
    "reproducible": _ReproducibleAttention,
}


def forward(engine: Engine, params: Params, state: State, batch: Batch, shape: Shape) -> Forward:
    """Runs the packed tokens through all layers."""
    c, plan = engine.config, engine.plan
    how = "reproducible" if engine.reproducible else engine.implementation
    attention = _ATTENTION[how](engine, state, batch, shape)
    instrumented = engine.instrumented and shape.kind != "draft"
    acting = batch.queries > 0
    drafts, verifies = acting & batch.drafting, acting & ~batch.drafting
    measured: set[int] = set()
    if shape.kind != "dense":
        measured |= set(plan.refresh_layers)
    if shape.kind != "draft" and engine.d_max:
        measured |= set(plan.verify_layers)
    refreshing = plan.refresh_layers if shape.kind != "dense" and engine.d_max else ()
    tokens = engine.tokenwise(jnp.sum(batch.queries))
    rotation = tokens.rotation(batch.position)
    x = params["embed"][batch.token]
    ks, vs, outside, recalls = [], [], [], []
    masses: list[jax.Array] = []  # of the measured layers, in order
    context, served = state.context, None
    for start, stop in segments(c.n_layers, measured, set(refreshing), engine.unrolled):
        if stop - start > 1 and not engine.unrolled:
            x, (k, v, mass), recall = _scanned(
                engine, params, attention, tokens, x, rotation, start, stop, served, start in measured
            )
            recalls.append(recall)
            ks.append(k)
            vs.append(v)
            masses += [] if mass is None else [mass]
            continue
        for layer in range(start, stop):
            weights = model.layer_of(params, layer)
            q, k, v = tokens.project(weights, x, rotation)
            part = attention.attend(q, k, v, _index(engine, layer), plan.sets[layer], layer in refreshing, served)
            if layer in measured:
                asks = layer in refreshing and "outside" in engine.signals
                current = (state.selection if served is None else served)[plan.sets[layer]] if asks else None
                found, beyond = attention.measure(q, part, _index(engine, layer), current)
                masses.append(found[None])
                outside += [] if beyond is None else [beyond]
            recalls.append(_recall(attention, q, part, _index(engine, layer), plan.sets[layer]))
            if layer in refreshing and plan.same_step:
                mass = masses[-1][:, :, 0] if instrumented else masses[-1]
                scores = Scores((layer,), mass, drafts[None], state.slots.length)
                context = engine.context.observe(context, scores)
                served = engine.context.select(context, state.slots.length, engine.room)
            x = tokens.finish(weights, x, normalise(part))
            ks.append(k if engine.unrolled else k[None])
            vs.append(v if engine.unrolled else v[None])
    measurement: Scores | None = None
    if masses:
        layers = tuple(sorted(measured))
        none = jnp.zeros_like(acting)
        rows = [(verifies if i in plan.verify_layers else none) | (drafts if i in refreshing else none) for i in layers]
        measurement = Scores(layers, jnp.concatenate(masses), jnp.stack(rows), state.slots.length)
    join: Callable[[list[Any]], Any] = tuple if engine.unrolled else (lambda parts: jnp.concatenate(parts))
    missed = sum(outside[1:], start=outside[0]) / np.float32(len(outside)) if outside else None
    selection = state.selection if served is None else served
    known = [r for r in recalls if r is not None]
    recall = sum(known[1:], start=known[0]) / np.float32(c.n_layers) if known else None
    return Forward(x, join(ks), join(vs), measurement, missed, recall, context, selection)


def segments(n_layers: int, measured: set[int], alone: set[int], unrolled: bool) -> list[tuple[int, int]]:
    """Runs of layers [start, stop) that do the same: all of them measured or none, those of `alone` by themselves."""
    if unrolled:
        return [(0, n_layers)]
    cuts = {0, n_layers} | {i for s in alone for i in (s, s + 1)}
    cuts |= {i for i in range(1, n_layers) if (i in measured) != (i - 1 in measured)}
    return list(itertools.pairwise(sorted(cuts)))


def _index(engine: Engine, layer: int) -> int | jax.Array:
    return layer if engine.unrolled else jnp.int32(layer)


def _recall(
    attention: _Attention | PallasAttention, q: jax.Array, part: Partial, layer: int | jax.Array, set_index: Any
) -> jax.Array | None:
    """One layer's recall, None unless this is an instrumented verification."""
    if isinstance(attention, _Attention) and attention.instrumented:
        return attention.recall(q, part, layer, set_index)
    return None


def _scanned(
    engine: Engine,
    params: Params,
    attention: _Attention | PallasAttention,
    tokens: model.Tokenwise,
    x: jax.Array,
    rotation: jax.Array,
    start: int,
    stop: int,
    served: Any,
    measured: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None], jax.Array | None]:
    """Layers [start, stop) as one loop; x, their k, v and page scores (None unless `measured`), and summed recall."""
    sets = jnp.asarray(np.asarray(engine.plan.sets, np.int32))

    def one(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, Any]:
        weights = model.layer_of(params, layer)
        q, k, v = tokens.project(weights, x, rotation)
        part = attention.attend(q, k, v, layer, sets[layer], False, served)
        mass = attention.measure(q, part, layer, None)[0] if measured else None
        recall = _recall(attention, q, part, layer, sets[layer])
        return tokens.finish(weights, x, normalise(part)), (k, v, mass, recall)

    x, (k, v, mass, recall) = model.through_layers(one, x, start, stop)
    return x, (k, v, mass), None if recall is None else jnp.sum(recall, axis=0)
