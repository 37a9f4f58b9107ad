"""How attention is cut into programs: rows of a query tile, keys of a block, keys of a split. All static.

Registers and shared memory decide, not arithmetic: docs/gpu_kernels.md has what each choice compiles to.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.launch import LEAST_ROWS, ceil_div, power_of_two

# Programs that fill a Hopper GPU: 132 multiprocessors, a few resident programs each, and some more so that rows of
# unequal length even out.
_PROGRAMS = 1024
# Keys below which a split costs more (its partial result is written and read again) than it spreads.
_LEAST_SPLIT = 256
_MOST_ROWS = 128
_BLOCK = 64


class Tiling(NamedTuple):
    """One way to cut.

    Attributes:
      rows: query rows (query tokens x group, padded) a program holds; a power of two.
      queries: query tokens a program holds.
      tiles: programs a row's queries take.
      block: keys a program reads at a time.
      split: keys a program reads in all, whole blocks. Counted from the list's start, so that the cut of a row's keys
        depends on nothing else.
      warps, stages: of a program, and how many blocks ahead it reads.
    """

    rows: int
    queries: int
    tiles: int
    block: int
    split: int
    warps: int
    stages: int


def tiling(
    *, batch: int, heads: int, group: int, dim: int, itemsize: int, max_queries: int, keys: int, rows: int | None = None
) -> Tiling:
    """The cut for `batch` rows of up to `max_queries` queries over lists of `keys` tokens.

    Args:
      heads: KV heads; group: query heads of each.
      dim: head_dim; itemsize: bytes of an element.
      rows: tile rows, in place of the ones chosen here: equal rows mean equal arithmetic for a token, whatever
        `max_queries` is.
    """
    wanted = rows or min(max(power_of_two(max_queries * group), LEAST_ROWS), _MOST_ROWS)
    if wanted < group or wanted != power_of_two(wanted) or wanted < LEAST_ROWS:
        raise ValueError(
            f"rows: {wanted}, expected a power of two of at least {LEAST_ROWS} that holds a group ({group})"
        )
    queries = min(wanted // group, max_queries)
    tiles = ceil_div(max_queries, queries)
    wide = power_of_two(dim) * itemsize  # bytes of a key
    block = _BLOCK if wide <= 256 else _BLOCK // 2
    warps = 4 if wanted <= 32 else 8
    stages = 3 if wanted <= 64 and wide <= 256 else 2
    splits = max(1, ceil_div(_PROGRAMS, batch * tiles * heads))
    split = max(_LEAST_SPLIT, ceil_div(keys, splits))
    return Tiling(wanted, queries, tiles, block, ceil_div(split, block) * block, warps, stages)
