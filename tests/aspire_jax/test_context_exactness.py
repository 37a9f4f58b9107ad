"""Whatever a draft may read, the tokens are those of plain greedy decoding; and it reads what its policy chose."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng
from aspire_jax.context import BlendContext, RefreshContext, StreamingContext, VegasContext
from aspire_jax.draft_length import DRAFT, VERIFY, FixedDraftLength, View

from . import tiny
from .tiny import Request

NEW = 24
PROMPTS = tiny.prompts((1, 2, 13, 40, 7, 30))
TWO_HEADS = tiny.config(layers=2, heads=4, kv=2)
DEEP = tiny.config(layers=3)


def fixed(c: Any, context: Any, **fields: Any) -> eng.Engine:
    return tiny.make(c, context, FixedDraftLength(gamma=2), **{"mixed": False, **fields})


SPARSE: dict[str, eng.Engine] = {
    "streaming": fixed(TWO_HEADS, StreamingContext(budget=12, sinks=4)),
    "vegas": fixed(DEEP, VegasContext(rho=0.1, least=8), unrolled=False, consecutive=False, dense=False),
    "vegas, a page a token": fixed(TWO_HEADS, VegasContext(rho=0.1, least=8), page_size=1, consecutive=False),
    "refresh layers": fixed(
        tiny.config(layers=4), RefreshContext(k_min=3, recent=1, layers=(1, 2)), dense=False, unrolled=False
    ),
    "blend of each KV head": fixed(
        TWO_HEADS, BlendContext(least=16, sinks=4, heads="kv"), mixed=True, dense=False, consecutive=False
    ),
    "blend": fixed(TWO_HEADS, BlendContext(least=16, sinks=4, renew="verification"), dense=False, unrolled=False),
}


@pytest.fixture(params=list(SPARSE), scope="module")
def served(request: pytest.FixtureRequest) -> tuple[eng.Engine, list[tiny.Answer], eng.State]:
    engine = SPARSE[request.param]
    return (engine, *tiny.serve(engine, [Request(p) for p in PROMPTS]))


def test_tokens_equal_plain_decoding(served: tuple[eng.Engine, list[tiny.Answer], eng.State]) -> None:
    """Six requests on four slots: two slots are taken over while the others go on."""
    engine, answers, _ = served
    tiny.assert_same(answers, tiny.greedy(engine.config, PROMPTS, NEW))
    for a in answers:
        assert a.steps == a.drafted + a.verifications
        assert a.accepted + a.verifications == NEW
    assert sum(a.accepted for a in answers) >= 3
    assert sum(a.drafted - a.accepted for a in answers) >= 3  # the context is smaller than what decides


def test_the_selection_fits_its_shape_and_names_pages_once(
    served: tuple[eng.Engine, list[tiny.Answer], eng.State],
) -> None:
    engine, _, state = served
    selection, lengths = tiny.selection(engine, state), np.asarray(state.slots.length)
    assert selection.shape == engine.selection_shape
    for row, length in enumerate(lengths):
        for pages in selection[:, row].reshape(-1, engine.selected):
            used = pages[pages >= 0]
            assert 0 < len(used) == len(set(used))
            assert used.max() < -(-length // engine.page_size)


@dataclasses.dataclass(frozen=True)
class Hesitant(FixedDraftLength):
    """Decodes plainly until a row has emitted `gamma` tokens, then drafts one at a time."""

    def decide(self, state: Any, view: View) -> jax.Array:
        late = view.lengths >= len(PROMPTS[3]) - 1 + self.gamma
        return jnp.where(view.active & late & (view.drafted < jnp.minimum(view.limit, 1)), DRAFT, VERIFY)


def test_plain_steps_select_nothing() -> None:
    """But for a request's first verification, which tells what a draft would read; a draft finds the latest."""
    engine = tiny.make(DEEP, VegasContext(rho=0.1, least=8), Hesitant(gamma=6), mixed=False, dense=False)
    weights = tiny.params_of(engine)
    state = tiny.put(engine, weights, tiny.start(engine), 0, Request(PROMPTS[3]))
    assert (np.asarray(state.selection) < 0).all()
    first, one = None, jnp.int32(1)
    for step in range(6):
        state = tiny.run(engine, weights, state, one, one)
        now = np.asarray(state.selection)[:, 0]
        first = now if step == 0 else first
        assert (now >= 0).any()
        assert (now == first).all()
        assert bool(state.slots.stale[0])
    latest = tiny.selection(engine, state)[:, 0]
    assert not (latest == first).all()
    state = tiny.run(engine, weights, state, one, one)
    assert int(state.slots.drafted[0]) == 1
    assert (np.asarray(state.selection)[:, 0] == latest).all()
    assert not bool(state.slots.stale[0])


@pytest.mark.parametrize("name", ["streaming", "blend of each KV head"])
def test_a_draft_reads_the_selected_pages_only(name: str) -> None:
    """Cached keys outside the selection may be anything, those inside may not: seen in the next draft's own keys."""
    engine = SPARSE[name]
    weights = tiny.params_of(engine)
    state = tiny.start(engine)
    for slot in range(engine.batch):
        state = tiny.put(engine, weights, state, slot, Request(PROMPTS[3]))
    one = jnp.int32(1)
    state = tiny.run(engine, weights, state, one, one)  # verifies
    selection = tiny.selection(engine, state)

    def drafted(edit: Any) -> np.ndarray:
        changed = jax.tree.map(jnp.copy, state)
        k = changed.cache.k if engine.unrolled else list(changed.cache.k)
        k = [edit(i, np.array(x)) for i, x in enumerate(k)]
        cache = changed.cache.replace(k=tuple(map(jnp.asarray, k)) if engine.unrolled else jnp.asarray(np.stack(k)))
        done = tiny.run(engine, weights, changed.replace(cache=cache), one, one)
        tail = done.tail.k[-1] if engine.unrolled else np.asarray(done.tail.k)[-1]
        return np.asarray(tail)[:, :, 0]

    def noise(inside: bool) -> Any:
        def edit(layer: int, k: np.ndarray) -> np.ndarray:
            if layer in engine.plan.refresh_layers:
                return k
            chosen = selection[engine.plan.sets[layer]]
            table = np.asarray(state.slots.table)
            for row in range(engine.batch):
                for head in range(engine.config.n_kv_heads):
                    mine = set(np.ravel(chosen[row] if chosen.ndim == 2 else chosen[row, head]).tolist())
                    for page in range(engine.pages):
                        if (page in mine) == inside:
                            k[head, table[row, page]] += 9.0
            return k

        return edit

    same = drafted(lambda _, k: k)
    if not engine.plan.same_step:
        np.testing.assert_allclose(drafted(noise(inside=False)), same, rtol=0, atol=0)
    assert np.abs(drafted(noise(inside=True)) - same).max() > 1e-3
