"""Mixed-mode attention of one step in plain XLA: the engine's rows in the terms of `xla`.

Drafting and verifying rows are merged from parts: committed tokens, the tail of drafts, the step's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from aspire_jax import cache as kv
from aspire_jax import instrument, signals
from aspire_jax.attention import reproducible as exact
from aspire_jax.attention import xla
from aspire_jax.attention.interface import Attention, ends
from aspire_jax.attention.softmax import MASKED, Partial, attend, by_page, log_sum_exp, merge, nothing

if TYPE_CHECKING:
    from aspire_jax.engine import Engine, State
    from aspire_jax.forward import Batch
    from aspire_jax.shapes import Shape


def page_mass(weights: jax.Array, heads: str, page_size: int) -> jax.Array:
    """Page scores from token weights [B, Q, Hkv, G, S]: heads combined, summed over each page, mean of the queries.

    Returns [B, P], or [B, Hkv, P] for `heads` "kv".
    """
    if heads == "max":
        # Two passes for a CPU, heads and then tokens: as one, which XLA would make of them, they take a third longer.
        token = jax.lax.optimization_barrier(jnp.max(weights, axis=(2, 3)))
        return jnp.mean(by_page(token, page_size), axis=1)
    return jnp.mean(by_page(weights, page_size), axis=(1, 3) if heads == "kv" else (1, 2, 3))


_New = tuple[jax.Array, jax.Array, jax.Array]
_Pages = tuple[jax.Array, jax.Array]


class XlaAttention(Attention):
    """See `Attention`.

    Attributes:
      cache: the cache, as a step's loops hand it back (see `xla.over_tiles`).
    """

    def __init__(self, engine: Engine, state: State, batch: Batch, shape: Shape) -> None:
        self.engine, self.state, self.batch, self.shape = engine, state, batch, shape
        self.cache = state.cache
        self.instrumented = engine.instrumented and shape.kind != "draft"
        s = state.slots
        self.lengths = jnp.where(batch.queries > 0, s.length, 0)
        slot = jnp.arange(engine.d_max, dtype=jnp.int32)[None]
        self.tail_now = slot == s.drafted[:, None]  # [B, tail] where this step's draft token goes
        self.tail_seen = slot <= s.drafted[:, None]
        # A mean over heads may come after the sum over a page's tokens, a maximum may not.
        self.kept_page = 1 if engine.plan.heads == "max" else engine.page_size
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

    def keeps(self, layer: int | jax.Array, measured: tuple[int, ...]) -> bool:
        """Whether `measure` will ask for the weights of this layer, which is to be one of those `measured`."""
        e = self.engine
        if self.instrumented or e.reproducible or not e.d_max:  # every query's; from tiles that hold new tokens, too
            return False
        return isinstance(layer, int) and layer in measured

    def whole_measured(self, q: jax.Array, layer: int | jax.Array) -> Partial:
        """As `whole`; keeps what `measure` asks for next, where it does."""
        if not self.keeps(layer, self.engine.plan.verify_layers):
            return self.whole(q, layer)
        c, s = self.cache, self.state.slots
        k, v = kv.leaf(c.k, layer), kv.leaf(c.v, layer)
        last = jnp.clip(self.batch.queries - 1, 0, q.shape[1] - 1)
        part, self.seen = xla.over_rows_keeping(
            q, k, v, s.table, self.lengths, self.engine.consecutive, last, self.kept_page
        )
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
        new, kept = (q, k, v), None
        if self.keeps(layer, (*e.plan.verify_layers, *(e.plan.refresh_layers if with_drafts else ()))):
            last = jnp.clip(b.queries[tiles.row] - 1 - tiles.first, 0, e.tile - 1)
            kept = xla.first_and_last(last, e.config.group)
        part, weights, near, (pages_k, pages_v) = self.over_tiles(q[index], new, (pages_k, pages_v), tiles, kept)
        if weights is not None:
            self.seen = self.of_rows(weights, part.top, tiles)
        if isinstance(layer, int):
            cache = self.cache
            self.cache = kv.KVCache(kv.replaced(cache.k, layer, pages_k), kv.replaced(cache.v, layer, pages_v))
        of_token = jnp.minimum(tiles.of_row[b.row] + b.query // e.tile, tiles.row.shape[0] - 1)
        return Partial(*(x[of_token, b.query % e.tile] for x in part)), near

    def of_rows(self, weights: jax.Array, top: jax.Array, tiles: xla.Tiles) -> xla.Seen:
        """What each row's first and last query attended to, from its first and last tile.

        Args:
          weights: [N, Hkv, 2 * G, P] of each tile's first query and its row's last; top: [N, tile, Hkv, G].
        """
        b, size, group = self.batch, self.engine.tile, self.engine.config.group
        end = jnp.maximum(b.queries - 1, 0)
        first, last = (jnp.minimum(tiles.of_row + n, top.shape[0] - 1) for n in (jnp.zeros_like(end), end // size))
        tops = jnp.stack([top[first, 0], top[last, end % size]], axis=1)
        # A row without tiles has been given others'.
        tops = jnp.where((tiles.row[first] == jnp.arange(first.shape[0]))[:, None, None, None], tops, MASKED)
        both = jnp.concatenate([weights[first, :, :group], weights[last, :, group:]], axis=2)  # [B, Hkv, 2 * G, P]
        return xla.Seen(both.swapaxes(0, 1), tops)

    def over_tiles(
        self, q: jax.Array, new: _New, pages: _Pages, tiles: xla.Tiles, kept: jax.Array | None
    ) -> tuple[Partial, jax.Array | None, Partial, _Pages]:
        """Tiles of queries `q` [N, tile, Hkv, G, D] over the cache, and all queries over the keys it does not hold.

        Args:
          new: queries, keys and values of the packed tokens; pages: one layer's keys and values.
          kept: see `xla.over_tiles`.

        Returns:
          Partial over [N, tile, Hkv, G] and its weights by page (see `xla.over_tiles`), Partial over [T, Hkv, G], and
          the pages.
        """
        e, (k, v), table = self.engine, pages, self.state.slots.table
        far, weights, k, v = xla.over_tiles(q, k, v, table, tiles, e.block, e.consecutive, kept, self.kept_page)
        return far, weights, xla.over_new(*new, self.new_seen), (k, v)

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
        """See `Attention.measure`."""
        heads, size = self.engine.plan.heads, self.engine.page_size
        if self.instrumented:
            weights = self.all_weights(q, part, layer)
            pages = jax.vmap(lambda w: page_mass(w[:, None], heads, size), in_axes=1, out_axes=1)(weights)
            weights = weights[:, :1]  # a drafting row's only query
        else:
            asked = ends(self.batch, self.shape)
            if self.seen is not None:
                lse = log_sum_exp(part)[jnp.minimum(asked, q.shape[0] - 1)]
                weights, size = self.seen.of(lse), size // self.kept_page
                self.seen = None
            else:
                weights = self.weights(q, part, layer, asked)
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

    def recall(self, q: jax.Array, part: Partial, layer: int | jax.Array, set_index: Any) -> jax.Array | None:
        """See `Attention.recall`."""
        if not self.instrumented:
            return None
        return instrument.recall(self.engine, self.state, self.all_weights(q, part, layer), set_index)


class ReproducibleAttention(XlaAttention):
    """Every step is packed, and a query meets committed and new tokens in the same blocks."""

    def over_tiles(
        self, q: jax.Array, new: _New, pages: _Pages, tiles: xla.Tiles, kept: jax.Array | None
    ) -> tuple[Partial, jax.Array | None, Partial, _Pages]:
        """See `XlaAttention.over_tiles`."""
        assert kept is None, "a reproducible step keeps no weights"
        e, b = self.engine, self.batch
        queries, new_k, new_v = new
        own = exact.new_tokens(new_k, new_v, b.first, jnp.where(b.drafting, 0, b.queries), e.d_max + 1)
        k, v = pages
        far, k, v = exact.over_tiles(q, k, v, own, self.state.slots.table, tiles, e.block, e.consecutive)
        return far, None, nothing(queries), (k, v)
