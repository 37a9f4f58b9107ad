"""Step shapes: the few static forms a step can take, and which one a given step needs.

A step's cost is a staircase in its width, so the schedulers ask this module for the same stairs the engine climbs.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import costs

# Query tokens a row may bring to a step; a verification of d drafts brings d + 1. Every stair is a program to compile.
QUERY_STAIRS = (1, 2, 3, 4, 5, 8, 17, 33)
# Packed tokens per row of the batch, where rows mix; and where they only verify by the tile loop.
PACKED_STAIRS = (1, 2, 4, 9, 17, 33)
LOOP_STAIRS = (1, 5)
# Reading a block through the tile loop costs this many times what it costs in the batched product (measured on the
# CPU, where the loop copies each block first; see docs/architecture.md).
LOOP_PENALTY = 2.7
# Copying a selected token costs as much as reading this many (a read, a write and a gather's indexing).
COPY_READS = 2.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """One static form of a step.

    Attributes:
      kind: "draft": every acting row drafts; "dense": every acting row verifies, the same number of query tokens is
        computed for all; "packed": any mixture, tokens packed side by side.
      tokens: packed tokens T.
      queries: most query tokens a row may bring.
    """

    kind: Literal["draft", "dense", "packed"]
    tokens: int
    queries: int


def stairs(values: tuple[int, ...], last: int) -> tuple[int, ...]:
    """The values below `last`, and `last`."""
    return (*(v for v in values if v < last), last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """All shapes of an engine.

    Attributes:
      batch: rows B.
      d_max: most drafts a row may hold; 0 where nothing is drafted.
      capacity: tokens a row's page table holds.
      block: keys the tile loop reads at a time.
      dense: whether batched shapes exist (they are for implementations that gain from them).
      refreshes: share of the layers that read the full context while drafting.
      mixed: whether rows may draft and verify in one step.
      width: where set, the one shape there is holds any step and is computed this many tokens at a time.
      alone: steps in which every row drafts have a shape of their own even where there are no batched ones.
      few: only the narrowest and the widest shape of each kind, for runs that are not timed: little to compile.
    """

    batch: int
    d_max: int
    capacity: int
    block: int
    dense: bool
    refreshes: float
    mixed: bool
    width: int | None = None
    alone: bool = False
    few: bool = False

    @property
    def all(self) -> tuple[Shape, ...]:
        """The shapes, narrow to wide within a kind; `choose` returns an index into them."""
        b, most = self.batch, self.d_max + 1
        if self.width is not None:
            return (Shape("packed", -(-b * most // self.width) * self.width, most),)
        shapes = [Shape("draft", b, 1)] if self.d_max and (self.dense or self.alone) else []
        if self.dense:
            shapes += [Shape("dense", b * q, q) for q in stairs(QUERY_STAIRS[:1] if self.few else QUERY_STAIRS, most)]
        if self.mixed or not self.dense:
            packed = stairs(PACKED_STAIRS[:1] if self.few else PACKED_STAIRS, most)
        elif self.few:
            packed = ()
        else:
            packed = tuple(q for q in LOOP_STAIRS if q <= most)
        return (*shapes, *(Shape("packed", b * q, most) for q in packed))

    def choose(self, drafting: jax.Array, queries: jax.Array, lengths: jax.Array) -> jax.Array:
        """Index of the cheapest shape that holds the step.

        Args:
          drafting: [B] bool.
          queries: query tokens of each row [B], 0 for idle rows.
          lengths: committed tokens [B].
        """
        total, most = jnp.sum(queries), jnp.max(queries)
        verifying = (queries > 0) & ~drafting
        loop_read = jnp.sum(jnp.where(verifying, self._blocks(lengths), 0).astype(jnp.float32))
        in_one = np.float32(self.batch * self.capacity) <= np.float32(LOOP_PENALTY) * loop_read
        only_drafts, no_drafts = ~jnp.any(verifying), ~jnp.any(drafting)
        kinds = np.array([s.kind for s in self.all])
        draft, dense = kinds == "draft", kinds == "dense"
        holds = np.array([s.queries if s.kind == "dense" else s.tokens for s in self.all], np.int32)
        fits = jnp.where(dense, no_drafts & (most <= holds), total <= holds)
        liked = jnp.where(dense, in_one, ~(in_one & no_drafts & self.dense))
        # Larger is better; among equals the first, that is the narrowest, shape wins.
        rank = jnp.where(draft, jnp.where(only_drafts, 3, 0), jnp.where(fits, jnp.where(liked, 2, 1), 0))
        return jnp.argmax(rank).astype(jnp.int32)

    def work(
        self,
        index: jax.Array,
        drafting: jax.Array,
        queries: jax.Array,
        lengths: jax.Array,
        selected: jax.Array,
        copied: jax.Array,
    ) -> jax.Array:
        """Work [4] (see `costs.work`) of a step of shape `index`.

        Args:
          drafting, queries, lengths: as for `choose`.
          selected: [B] float32, tokens a draft of the row reads.
          copied: scalar bool, whether the selected pages are copied afresh first.
        """
        width = jnp.asarray([s.tokens for s in self.all], jnp.float32)[index]
        if self.width is not None:
            turns = (jnp.sum(queries) + self.width - 1) // self.width
            width = (turns * self.width).astype(jnp.float32)
        dense = jnp.asarray([s.queries if s.kind == "dense" else 0 for s in self.all], jnp.float32)[index]
        verifying = (queries > 0) & ~drafting
        context = jnp.where(drafting, selected + np.float32(self.refreshes) * lengths.astype(jnp.float32), 0.0)
        blocks = jnp.where(verifying, self._blocks(lengths), 0).astype(jnp.float32)
        penalty = np.float32(LOOP_PENALTY if self.dense else 1.0)
        loop_read = jnp.sum(blocks) * penalty
        loop_pairs = jnp.sum(blocks * queries.astype(jnp.float32)) * penalty
        rows = np.float32(self.batch * self.capacity)
        read = jnp.where(dense > 0, rows, loop_read) + jnp.sum(context)
        read = read + jnp.where(copied, np.float32(COPY_READS) * jnp.sum(selected), 0.0)
        return costs.work(width, read, jnp.where(dense > 0, rows * dense, loop_pairs) + jnp.sum(context))

    def forecast(self, drafting: jax.Array, queries: jax.Array, lengths: jax.Array, selected: jax.Array) -> jax.Array:
        """Work [4] of the step in which rows act as given, without a copy of the selected pages."""
        index = self.choose(drafting, queries, lengths)
        return self.work(index, drafting, queries, lengths, selected, jnp.asarray(False))

    def copy(self, selected: jax.Array) -> jax.Array:
        """Work [4] of copying every row's selected pages, beside the step it happens in."""
        zero = jnp.float32(0.0)
        return costs.work(zero, np.float32(COPY_READS) * jnp.sum(selected), zero) * np.array([0, 1, 1, 1], np.float32)

    def _blocks(self, lengths: jax.Array) -> jax.Array:
        return (lengths + self.block - 1) // self.block * self.block
