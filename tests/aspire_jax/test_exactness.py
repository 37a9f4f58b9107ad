"""Whatever the engine, its method and its layout: the tokens are those of plain greedy decoding.

Every engine serves more requests than it has slots, meets stop tokens at every place, and has its drafts, selections
and copies overwritten with garbage. The truth is `model.dense_logits`: attention over the whole sequence, no cache.
"""

from __future__ import annotations

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng

from . import tiny
from .tiny import Request

FACTORS = ("dense", "unrolled", "step", "in_step", "consecutive")
# Every pair of factors in all four combinations (a strength-two array); all 32 with ASPIRE_EVERY_COMBINATION=1.
PAIRWISE = [
    (0, 0, 0, 0, 0),
    (0, 0, 1, 1, 1),
    (0, 1, 0, 1, 1),
    (0, 1, 1, 0, 0),
    (1, 0, 0, 1, 0),
    (1, 0, 1, 0, 1),
    (1, 1, 0, 0, 1),
    (1, 1, 1, 1, 0),
]
if os.environ.get("ASPIRE_EVERY_COMBINATION"):
    PAIRWISE = list(itertools.product((0, 1), repeat=5))
# Where layers are scanned, two of them go before the refresh layer, so that a scan has more than one.
DEEP = tiny.config(layers=3)
FLAT = list(tiny.MODELS.values())
NEW = 24
LENGTHS = (1, 2, 13, 40, 7, 30, 41)  # the last one and NEW tokens fill a slot of 64
PROMPTS = tiny.prompts(LENGTHS)


def _engines() -> dict[str, eng.Engine]:
    engines = {}
    for i, combination in enumerate(PAIRWISE):
        on = dict(zip(FACTORS, map(bool, combination), strict=True))
        named = " ".join(name if value else f"no-{name}" for name, value in on.items())
        in_step, renew = on.pop("in_step"), "step" if on.pop("step") else "verification"
        c, layers = (FLAT[i % 3], None) if on["unrolled"] else (DEEP, (2,))
        d_max = 2 if on["dense"] else 3
        engines[f"aspire {named}"] = tiny.aspire(c, in_step=in_step, renew=renew, d_max=d_max, layers=layers, **on)
    for c, (dense, unrolled, consecutive) in zip(
        [FLAT[0], FLAT[1], FLAT[2], DEEP], [(1, 1, 1), (0, 1, 0), (1, 1, 0), (0, 0, 1)], strict=True
    ):
        fields = {"dense": bool(dense), "unrolled": bool(unrolled), "consecutive": bool(consecutive)}
        engines[f"plain {' '.join(k for k, v in fields.items() if v)} {c.family}"] = tiny.make(c, **fields)
    return engines


ENGINES = _engines()
DRAFTING = [name for name, engine in ENGINES.items() if engine.d_max]


@pytest.fixture(params=list(ENGINES), scope="module")
def engine(request: pytest.FixtureRequest) -> eng.Engine:
    return ENGINES[request.param]


def truth_of(engine: eng.Engine) -> list[tiny.Answer]:
    return tiny.greedy(engine.config, PROMPTS, NEW)


def check_counts(a: tiny.Answer) -> None:
    """Each step of a row drafts one token or verifies; a verification emits what it accepts and one token more."""
    assert a.steps == a.drafted + a.verifications
    assert a.accepted <= a.drafted
    inside = a.accepted + a.verifications - len(a.tokens)  # a stop that was an accepted draft ends the run
    assert inside == 0 or (inside == 1 and a.reason == eng.STOP)


def test_tokens_equal_plain_decoding(engine: eng.Engine) -> None:
    """Seven requests on four slots: three slots are taken over while the others go on."""
    truth = truth_of(engine)
    news = (NEW, NEW, 3, NEW, 20, 17, 9)
    answers, _ = tiny.serve(engine, [Request(p, n) for p, n in zip(PROMPTS, news, strict=True)])
    tiny.assert_same(answers, truth)
    for a, n in zip(answers, news, strict=True):
        assert (len(a.tokens), a.reason) == (n, eng.LENGTH)
        check_counts(a)
        assert min(a.margins) >= 0
    if engine.d_max:
        assert sum(a.accepted for a in answers) >= 6
        assert sum(a.drafted - a.accepted for a in answers) >= 3
    else:
        assert all(a.steps == len(a.tokens) for a in answers)


def test_margins_are_those_of_the_truth(engine: eng.Engine) -> None:
    answers, _ = tiny.serve(engine, [Request(p, 8) for p in PROMPTS[:4]])
    for a, t in zip(answers, truth_of(engine), strict=False):
        np.testing.assert_allclose(a.margins, t.margins[:8], atol=tiny.TIE)


def test_nothing_after_a_stop_leaks(engine: eng.Engine) -> None:
    """A stop token at every place of the truth in turn; what was drafted behind it is neither emitted nor counted."""
    truth, inside = truth_of(engine)[:4], 0
    for place in range(0, NEW, 2):
        stops = [t.tokens[place] for t in truth]
        requests = [Request(p, NEW, (s, tiny.VOCAB + 5)) for p, s in zip(PROMPTS, stops, strict=False)]
        answers, state = tiny.serve(engine, requests)
        out = np.asarray(state.slots.out)
        for row, (a, t, stop) in enumerate(zip(answers, truth, stops, strict=True)):
            want = t.tokens[: t.tokens.index(stop) + 1]
            assert (a.tokens, a.reason) == (want, eng.STOP)
            check_counts(a)
            assert not out[row, len(want) :].any()
            inside += a.accepted + a.verifications > len(a.tokens)
    assert inside or not engine.d_max  # some stop was an accepted draft


def test_max_new_of_one_and_two(engine: eng.Engine) -> None:
    for n in (1, 2):
        answers, _ = tiny.serve(engine, [Request(p, n) for p in PROMPTS])
        tiny.assert_same(answers, truth_of(engine))
        assert all(len(a.tokens) == n and a.reason == eng.LENGTH for a in answers)
        assert all(a.drafted == 0 for a in answers)


def test_rows_without_a_request_change_nothing(engine: eng.Engine) -> None:
    answers, state = tiny.serve(engine, [Request(PROMPTS[i]) for i in (3, 2)], slots=(1, 3))
    tiny.assert_same(answers, [truth_of(engine)[i] for i in (3, 2)])
    assert np.asarray(state.slots.steps)[[0, 2]].tolist() == [0, 0]
    assert np.asarray(state.slots.emitted)[[0, 2]].tolist() == [0, 0]


def test_a_slot_filled_to_its_last_token(engine: eng.Engine) -> None:
    """Prompt and completion take every place of the slot's pages."""
    answers, state = tiny.serve(engine, [Request(PROMPTS[i], NEW) for i in (3, 6)])
    tiny.assert_same(answers, [truth_of(engine)[i] for i in (3, 6)])
    assert int(state.slots.length[1]) == engine.capacity


def garbage(engine: eng.Engine, seed: int) -> tiny.Edit:
    """Overwrites everything that is only a guess: drafts, selections, copied pages, drafted keys and values."""
    rng = np.random.default_rng(seed)

    def noise(x: jax.Array) -> jax.Array:
        return jnp.asarray(20 * rng.standard_normal(x.shape), x.dtype)

    def edit(state: eng.State) -> eng.State:
        s, pages = state.slots, engine.pages
        drafts = jnp.asarray(rng.integers(0, tiny.VOCAB, s.drafts.shape), jnp.int32)
        drafts = jnp.where(jnp.asarray(rng.random(s.drafts.shape) < 0.5), drafts, s.drafts)
        selection = jnp.asarray(rng.integers(-1, pages, state.selection.shape), jnp.int32)
        return state.replace(
            tail=jax.tree.map(noise, state.tail),
            compact=jax.tree.map(noise, state.compact),
            selection=selection,
            slots=s.replace(drafts=drafts, stale=jnp.asarray(rng.random(engine.batch) < rng.choice([0, 0.5]))),
        )

    return edit


@pytest.mark.parametrize("engine", DRAFTING, indirect=True)
def test_output_does_not_depend_on_drafts_or_selections(engine: eng.Engine) -> None:
    answers, _ = tiny.serve(engine, [Request(p) for p in PROMPTS], burst=1, edit=garbage(engine, 1))
    tiny.assert_same(answers, truth_of(engine))
    for a in answers:
        check_counts(a)
    assert sum(a.drafted - a.accepted for a in answers) >= 10


@pytest.mark.parametrize("engine", DRAFTING, indirect=True)
def test_right_drafts_are_accepted(engine: eng.Engine) -> None:
    """The truth handed over as drafts: every one is accepted, and the stop inside them ends the run."""
    truth = truth_of(engine)[:4]
    table = jnp.asarray([t.tokens + [0] * engine.d_max for t in truth], jnp.int32)

    def teach(state: eng.State) -> eng.State:
        place = state.slots.emitted[:, None] + jnp.arange(engine.d_max)[None]
        return state.replace(slots=state.slots.replace(drafts=jnp.take_along_axis(table, place, axis=1)))

    answers, _ = tiny.serve(engine, [Request(p) for p in PROMPTS[:4]], burst=1, edit=teach)
    tiny.assert_same(answers, truth)
    assert all(a.accepted == a.drafted for a in answers)
    assert sum(a.drafted for a in answers) >= 3 * NEW / 2
    stops = [t.tokens[6] for t in truth]
    requests = [Request(p, NEW, (stop,)) for p, stop in zip(PROMPTS, stops, strict=False)]
    answers, _ = tiny.serve(engine, requests, burst=1, edit=teach)
    for a, t, stop in zip(answers, truth, stops, strict=True):
        assert a.tokens == t.tokens[: t.tokens.index(stop) + 1]
        check_counts(a)


def test_a_new_request_inherits_nothing(engine: eng.Engine) -> None:
    """The same request gives the same answer and the same counts after others have used every slot."""
    requests = [Request(p) for p in PROMPTS[:4]]
    first, state = tiny.serve(engine, requests)
    _, state = tiny.serve(engine, [Request(p[::-1]) for p in PROMPTS[:4]], state=state)
    if engine.d_max:
        state = garbage(engine, 2)(state)
    again, _ = tiny.serve(engine, requests, state=state)
    tiny.assert_same(again, truth_of(engine)[:4])
    for a, b in zip(again, first, strict=True):
        assert (a.tokens, a.reason, a.steps, a.drafted, a.accepted) == (
            b.tokens,
            b.reason,
            b.steps,
            b.drafted,
            b.accepted,
        )
