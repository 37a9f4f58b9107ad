"""Prompts that begin alike: what is copied equals what would have been computed, to the last bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng
from aspire_jax import prefill, prefix
from aspire_jax.cache import rows_view
from tests.aspire_jax import tiny

CHUNK = tiny.CHUNK


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("prompt", "held", "slot", "want"),
    [
        ([1, 2, 3, 4, 5], [[], []], 0, (0, 0)),
        ([1, 2, 3, 4, 5], [[1, 2, 3, 4, 5], []], 1, (0, 5)),  # all of it
        ([1, 2, 3, 4, 5], [[1, 2, 3, 4, 5, 6], []], 1, (0, 4)),  # in a longer one: its third chunk has other content
        ([1, 2, 3, 4, 5], [[], [1, 2, 3, 4]], 0, (1, 4)),  # two chunks of two
        ([1, 2, 3, 4, 5], [[], [1, 2, 3, 9, 5]], 0, (1, 2)),  # three in common, one whole chunk
        ([1, 2, 3, 4, 5], [[], [1, 9, 3, 4, 5]], 0, (0, 0)),  # less than a chunk: nothing, and nothing to copy
        ([1, 2, 3, 4, 5], [[1, 2, 7], [1, 2, 3, 4, 7], [1, 2, 3, 4, 8]], 0, (1, 4)),  # the longest
        ([1, 2, 3, 4, 5], [[1, 2, 3, 4, 7], [1, 2, 3, 4, 8]], 1, (1, 4)),  # of equals the prompt's own slot
        ([], [[1, 2], []], 1, (1, 0)),
    ],
)
def test_the_longest_beginning(prompt: list[int], held: list[list[int]], slot: int, want: tuple[int, int]) -> None:
    assert prefix.longest(tokens(*prompt), [tokens(*t) for t in held], slot, chunk=2) == want


CONFIG = tiny.config()
ENGINES = {
    "unrolled": tiny.make(CONFIG),
    "scanned": tiny.make(CONFIG, unrolled=False),
    "pages anywhere": tiny.make(CONFIG, consecutive=False),
    "bfloat16, scanned": tiny.make(CONFIG, dtype="bfloat16", unrolled=False, consecutive=False),
    "token pages": tiny.make(CONFIG, page_size=1),
    "reproducible": tiny.make(CONFIG, reproducible=True, capacity=512),
    "kernels": tiny.make(CONFIG, implementation="pallas", interpret=True, unrolled=False, dense=False),
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("common", [2 * CHUNK, 2 * CHUNK + 3], ids=["two chunks", "all of it"])
def test_a_copy_has_the_bits_of_its_own_prefill(engine: eng.Engine, common: int) -> None:
    rng = np.random.default_rng(0)
    whole = common % CHUNK != 0
    source = rng.integers(0, tiny.VOCAB, common if whole else 3 * CHUNK).tolist()
    prompt = source if whole else source[:common] + rng.integers(0, tiny.VOCAB, CHUNK - 2).tolist()
    weights = tiny.params_of(engine)
    state = tiny.put(engine, weights, tiny.start(engine), 2, tiny.Request([*source, 1]))
    alone = tiny.put(engine, weights, jax.tree.map(jnp.copy, state), 1, tiny.Request([*prompt, 1]))
    copied = jax.jit(functools.partial(prefix.copy, engine))(state, jnp.int32(2), jnp.int32(1), jnp.int32(common))
    for chunk, begin, count in prefill.chunks(np.asarray(prompt[common:], np.int32), CHUNK):
        where = (jnp.int32(1), jnp.asarray(chunk), jnp.int32(common + begin), jnp.int32(count))
        copied = tiny.write_chunk(engine, weights, copied, *where)
    for row, held in ((1, len(prompt)), (2, len(source))):
        np.testing.assert_array_equal(committed(engine, copied, row, held), committed(engine, alone, row, held))
    assert np.abs(committed(engine, copied, 1, len(prompt))).min(axis=(0, 1, 2, 4)).min() > 0  # nothing left out


def committed(engine: eng.Engine, state: eng.State, row: int, count: int) -> np.ndarray:
    """[2, L, Hkv, count, D] keys and values of a row's first tokens."""
    view = functools.partial(rows_view, table=state.slots.table, consecutive=engine.consecutive)
    leaves = [list(x) for x in (state.cache.k, state.cache.v)]
    return np.stack([[np.asarray(view(x)[:, row, :count], np.float32) for x in part] for part in leaves])
