"""Which pages of the prompt SnapKV keeps, by hand; and the attention it goes by, against attention without a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng
from aspire_jax import model, rope
from aspire_jax.context import PromptWeights, Room, SnapKVContext
from aspire_jax.draft_length import FixedDraftLength
from aspire_jax.observation import window_of

from . import tiny
from .test_context import chosen
from .tiny import Request

CONFIG = tiny.config(layers=1, heads=2, kv=2)
ROOM = Room(10, 4, 8, 2)


def observed(policy: SnapKVContext, start: int, *best: dict[int, float], room: Room = ROOM) -> Any:
    """State of one row whose window begins at `start`, and whose heads attended to the tokens {position: weight}."""
    weights = np.zeros((1, len(best), room.pages * room.page_size), np.float32)
    for head, tokens in enumerate(best):
        for position, weight in tokens.items():
            weights[0, head, position] = weight
    state = policy.init(CONFIG, 1, room)
    prompt = PromptWeights(jnp.array([True]), jnp.int32(start), jnp.asarray(weights))
    return policy.observe_prompt(state, prompt)


def pages(policy: SnapKVContext, state: Any, length: int, room: Room = ROOM) -> list[list[int]]:
    got = policy.select(state, jnp.asarray([length], jnp.int32), room)
    assert got.shape == (1, 1, 2, policy.capacity(room))
    return chosen(got[0, 0])


def test_each_head_keeps_its_best_prompt_pages_the_window_and_what_was_generated() -> None:
    """A prompt of 24 tokens, its window the last 4: 8 further tokens are two pages of the first five."""
    policy = SnapKVContext(budget=12, window=4, kernel=1)
    state = observed(policy, 20, {1: 0.1, 5: 0.4, 13: 0.3, 17: 0.2}, {2: 0.5, 9: 0.1, 10: 0.1, 18: 0.15})
    assert pages(policy, state, 23) == [[1, 3, 5], [0, 2, 5]]
    # Nothing is chosen anew; the generated tokens stay in, page by page.
    assert pages(policy, state, 25) == [[1, 3, 5, 6], [0, 2, 5, 6]]
    assert pages(policy, state, 31) == [[1, 3, 5, 6, 7], [0, 2, 5, 6, 7]]


def test_pooling_lets_neighbours_count_across_pages() -> None:
    """Kernel 5: a fifth of each weight goes to every token up to two places away.

    Token 7, the last of page 1, gives 2 of its 5 shares to page 2; token 13 spreads over page 3 and, one share, page 2.
    """
    policy = SnapKVContext(budget=8, window=4, kernel=5)
    state = observed(policy, 20, {7: 0.5, 12: 0.3}, {})
    mass = np.asarray(state.mass)[0, 0, 0]
    np.testing.assert_allclose(mass[:5], [0, 0.3, 0.2 + 0.12, 0.18, 0], rtol=1e-5, atol=1e-7)
    assert pages(policy, state, 23)[0] == [2, 5]


def test_pooling_stays_within_the_tokens_before_the_window() -> None:
    state = observed(SnapKVContext(budget=8, window=4, kernel=5), 18, {17: 1.0, 0: 0.5}, {})
    mass = np.asarray(state.mass)[0, 0, 0]
    np.testing.assert_allclose(mass[:6], [0.3, 0, 0, 0.2, 0.4, 0], rtol=1e-5, atol=1e-7)


def test_a_prompt_within_the_budget_is_read_whole() -> None:
    policy = SnapKVContext(budget=24, window=8)
    for start, length in ((0, 0), (0, 5), (6, 13), (12, 19)):
        state = observed(policy, start, {}, {})
        assert pages(policy, state, length) == [list(range(-(-length // 4)))] * 2


def test_window_that_begins_inside_a_page_keeps_that_page() -> None:
    policy = SnapKVContext(budget=8, window=4, kernel=1)
    assert pages(policy, observed(policy, 19, {0: 1.0}, {17: 1.0}), 22) == [[0, 4, 5], [0, 4, 5]]


def test_single_tokens() -> None:
    policy, room = SnapKVContext(budget=5, window=2, kernel=1), Room(20, 1, 8, 2)
    state = observed(policy, 8, {1: 3, 4: 2, 6: 1, 7: 0.5}, {0: 1, 2: 1, 3: 1, 5: 0.5}, room=room)
    assert pages(policy, state, 11, room) == [[1, 4, 6, 8, 9, 10], [0, 2, 3, 8, 9, 10]]


@pytest.mark.parametrize("size", [1, 3, 16])
def test_capacity_holds_all_that_may_be_generated(size: int) -> None:
    policy, new = SnapKVContext(budget=40, window=7), 50
    room = Room(60 + new * 2 // size, size, new, 4)
    for prompt in (1, 30, 8 * size, 60 + size):
        start = max(prompt - 7, 0)
        length = min(prompt - 1 + new, room.pages * size)
        for head in pages(policy, observed(policy, start, {}, {}, room=room), length, room):
            assert set(range(start // size, -(-length // size))) <= set(head)


def test_observes_and_forgets_by_row() -> None:
    policy = SnapKVContext(budget=12, window=4, kernel=1)
    state = policy.init(CONFIG, 2, ROOM)
    ones = jnp.ones((1, 2, 40), jnp.float32)
    state = policy.observe_prompt(state, PromptWeights(jnp.array([False, True]), jnp.int32(20), ones))
    assert np.asarray(state.mass)[0, :, 0, 0].tolist() == [0, 4]
    assert np.asarray(state.window).tolist() == [0, 20]
    state = policy.forget(state, jnp.array([False, True]))
    assert not np.asarray(state.mass).any()
    assert not np.asarray(state.window).any()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"window": 0}, "window: 0"), ({"window": 512}, "window: 512"), ({"kernel": 4}, "kernel: 4")],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        SnapKVContext(**fields)


def test_window_of_a_prompt() -> None:
    assert [x.tolist() if i == 0 else x for i, x in enumerate(window_of(np.arange(9), 4))] == [[5, 6, 7, 8], 4]
    assert [x.tolist() if i == 0 else x for i, x in enumerate(window_of(np.arange(2), 4))] == [[0, 1, 0, 0], 2]


MODEL = tiny.config(layers=2, heads=4, kv=2)
WINDOW = 5


def dense_weights(c: Any, prompt: list[int], window: int) -> np.ndarray:
    """[L, Hkv, T] attention of the last `window` tokens, mean over them and each group, without a cache."""
    weights, tokens = tiny.unstacked(c), jnp.asarray(prompt)
    t = len(prompt)
    cos_sin = rope.rotation(c.rope, c.head_dim, c.max_length, jnp.arange(t))
    causal = jnp.tril(jnp.ones((t, t), bool))[None, None]
    x, rows = weights["embed"][tokens], []
    for layer in weights["layers"]:
        q, k, v = model.project(c, layer, x, cos_sin)
        scores = jnp.einsum("qhgd,khd->hgqk", q, k, precision="highest") * np.float32(c.head_dim**-0.5)
        attention = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        rows.append(np.asarray(attention[:, :, -window:].mean(axis=(1, 2))))
        x = model.finish(c, layer, x, jnp.einsum("hgqk,khd->qhgd", attention, v, precision="highest"))
    return np.stack(rows)


ENGINES = {
    "unrolled": tiny.make(
        MODEL, SnapKVContext(budget=16, window=WINDOW, kernel=1), FixedDraftLength(gamma=2), mixed=False, max_new=8
    ),
    "scanned, shuffled": tiny.make(
        MODEL,
        SnapKVContext(budget=12, window=WINDOW),
        FixedDraftLength(gamma=2),
        mixed=False,
        consecutive=False,
        unrolled=False,
        dense=False,
        max_new=8,
    ),
}
PROMPTS = tiny.prompts((1, 4, 5, 6, 40, 23))


def test_the_attention_observed_is_that_of_the_whole_prompt() -> None:
    engine = ENGINES["unrolled"]
    state = tiny.start(engine)
    for slot, prompt in enumerate(PROMPTS[2:]):
        state = tiny.put(engine, tiny.params_of(engine), state, slot, Request(prompt, 8))
    mass = np.asarray(state.context.mass)  # kernel 1: the tokens' weights, summed over pages of 4
    for slot, prompt in enumerate(PROMPTS[2:]):
        start = max(len(prompt) - WINDOW, 0)
        want = np.zeros((2, 2, 64))
        want[..., :start] = dense_weights(MODEL, prompt, WINDOW)[..., :start]
        np.testing.assert_allclose(mass[:, slot], want.reshape(2, 2, 16, 4).sum(axis=-1), rtol=2e-4, atol=1e-6)
    assert np.asarray(state.context.window).tolist() == [0, 1, 35, 18]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_tokens_equal_plain_decoding(engine: eng.Engine) -> None:
    answers, state = tiny.serve(engine, [Request(p, 8) for p in PROMPTS])
    tiny.assert_same(answers, tiny.greedy(MODEL, PROMPTS, 24))
    assert sum(a.accepted for a in answers) > 0
    assert np.asarray(state.selection).shape == (2, 4, 2, engine.selected)


def test_the_prompt_pages_stay_fixed() -> None:
    engine = ENGINES["unrolled"]
    weights = tiny.params_of(engine)
    state = tiny.put(engine, weights, tiny.start(engine), 0, Request(PROMPTS[4], 8))
    seen = []
    while bool(state.slots.active[0]):
        state = tiny.run(engine, weights, state, jnp.int32(1), jnp.int32(4))
        selection = tiny.selection(engine, state)[:, 0].reshape(4, -1)
        seen.append([tuple(sorted(p for p in row if 0 <= p < 35 // 4)) for row in selection])
        assert all(set(range(35 // 4, -(-int(state.slots.length[0]) // 4))) <= set(row) for row in selection)
    assert len(seen) >= 3
    assert all(pages == seen[0] for pages in seen)
    assert all(len(pages) == 3 for pages in seen[0])  # 11 tokens beside the window
    assert len(set(seen[0])) > 1
