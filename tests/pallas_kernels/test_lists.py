"""What the kernels are told, and how the work is cut."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.tiling import tiling


def test_a_whole_table_stops_at_its_length() -> None:
    table = jnp.asarray([[4, 5, 6], [7, 8, 9], [1, 2, 3], [0, 10, 11]], jnp.int32)
    lists = pk.whole_table(table, jnp.asarray([0, 1, 8, 12], jnp.int32), 4)
    assert np.asarray(lists.counts).tolist() == [[0, 0, 0], [1, 0, 0], [4, 4, 0], [4, 4, 4]]
    assert np.asarray(lists.used).tolist() == [0, 1, 2, 3]
    assert np.array_equal(lists.ids, table)


def test_a_selection_reads_the_committed_tokens_of_its_pages() -> None:
    table = jnp.asarray([[4, 5, 6], [7, 8, 9], [1, 2, 3]], jnp.int32)
    chosen = jnp.asarray([[2, 0, -1], [-1, 1, -1], [-1, -1, -1]], jnp.int32)
    lists = pk.selected_pages(table, chosen, jnp.asarray([9, 6, 12], jnp.int32), 4)
    assert np.asarray(lists.counts).tolist() == [[1, 4, 0], [0, 2, 0], [0, 0, 0]]
    assert np.asarray(lists.used).tolist() == [2, 2, 0]
    assert np.asarray(lists.ids)[0, :2].tolist() == [6, 4]
    assert int(np.asarray(lists.ids)[1, 1]) == 8


def test_heads_may_have_selections_of_their_own() -> None:
    table = jnp.asarray([[4, 5, 6], [7, 8, 9]], jnp.int32)
    chosen = jnp.asarray([[[2, 0], [1, -1]], [[-1, -1], [-1, 0]]], jnp.int32)
    lists = pk.selected_pages(table, chosen, jnp.asarray([9, 6], jnp.int32), 4)
    assert np.asarray(lists.counts).tolist() == [[[1, 4], [4, 0]], [[0, 0], [0, 4]]]
    assert np.asarray(lists.used).tolist() == [2, 2]
    assert np.asarray(lists.ids)[0, :, 0].tolist() == [6, 5]


COMMON = {"heads": 8, "group": 4, "dim": 128, "itemsize": 2}


def test_splits_grow_with_context_and_shrink_with_the_batch() -> None:
    def splits(batch: int, keys: int) -> int:
        return -(-keys // tiling(batch=batch, max_queries=1, keys=keys, **COMMON).split)

    assert [splits(1, n) for n in (256, 1024, 4096, 32768)] == [1, 4, 16, 128]
    assert [splits(b, 32768) for b in (1, 4, 12, 128, 256)] == [128, 32, 11, 1, 1]


@pytest.mark.parametrize(
    ("group", "most", "rows", "queries", "tiles"),
    [
        (4, 1, 16, 1, 1),
        (8, 1, 16, 1, 1),
        (4, 16, 64, 16, 1),
        (4, 17, 128, 17, 1),
        (8, 17, 128, 16, 2),
        (3, 256, 128, 42, 7),
    ],
)
def test_tiles_hold_whole_groups_and_no_more_rows_than_registers_allow(
    group: int, most: int, rows: int, queries: int, tiles: int
) -> None:
    cut = tiling(**COMMON | {"group": group}, batch=4, max_queries=most, keys=4096)
    assert (cut.rows, cut.queries, cut.tiles) == (rows, queries, tiles)
    assert cut.split % cut.block == 0


def test_a_tile_that_cannot_hold_a_group_is_refused() -> None:
    for rows in (8, 24):
        with pytest.raises(ValueError, match=f"rows: {rows}, expected a power of two of at least 16"):
            tiling(**COMMON, batch=1, max_queries=1, keys=64, rows=rows)
