"""The seed alone decides the text: with and without speculation, alone and in a batch, whoever is beside it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng
from aspire_jax import model
from aspire_jax.sampling.rows import Support

from . import sampling_reference as reference
from . import tiny
from .tiny import Request

C = tiny.config(layers=2, heads=4, kv=2)
SUPPORT = Support(penalties=True, bias=True, logprobs=3)
NEW, STOP = 20, (13, 27)
LENGTHS = (5, 13, 2, 30, 17, 8, 1, 22, 40)
PROMPTS = tiny.prompts(LENGTHS, seed=4)
RNG = np.random.default_rng(0)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05, "repetition": 1.3},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "presence": 0.5, "frequency": 0.3, "min_tokens": 12},
    {"bias": 2 * RNG.standard_normal(tiny.VOCAB), "repetition": 1.5, "logprobs": True},
    {"temperature": 1.5, "logprobs": True},
    {"frequency": 2.0, "min_tokens": 15, "logprobs": True},
]


def requests(support: Support = SUPPORT, shift: int = 0) -> list[Request]:
    """A request of each kind; `shift` gives each prompt another kind."""
    made = []
    for i, prompt in enumerate(PROMPTS):
        fields = dict(KINDS[(i + shift) % len(KINDS)])
        if support.penalties:
            fields["seen"] = np.isin(np.arange(tiny.VOCAB), prompt)
        made.append(Request(prompt, NEW, STOP, tiny.settings(support, seed=100 + i + shift, **fields)))
    return made


@functools.partial(jax.jit, static_argnums=0)
def _logits(c: Any, weights: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    return model.dense_logits(c, weights, tokens)[length - 1]


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    padded = np.zeros(64, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits(C, tiny.weights(C), jnp.asarray(padded), jnp.int32(len(tokens))))


@functools.cache
def truth(shift: int = 0) -> list[list[reference.Choice]]:
    """Plain attention over the whole sequence, and the contract in numpy."""
    return [reference.answer_of(logits_after, r.settings, r.prompt, NEW, STOP) for r in requests(shift=shift)]


ENGINES = {
    "plain": tiny.make(C, dense=False, sampling=SUPPORT),
    "mixed, a batch of 32": tiny.aspire(
        C, in_step=False, renew="step", d_max=3, dense=False, batch=32, sampling=SUPPORT
    ),
}
DRAFTS = ENGINES["mixed, a batch of 32"]


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> eng.Engine:
    return ENGINES[request.param]


def check(answers: Sequence[tiny.Answer], want: Sequence[Sequence[reference.Choice]]) -> None:
    """Equal to the truth but for near ties, which are asserted to be what they are called."""
    for i, (got, choices) in enumerate(zip(answers, want, strict=True)):
        for place, (token, choice) in enumerate(zip(got.tokens, choices, strict=False)):
            if token != choice.token:
                assert got.margins[place] < tiny.TIE, (i, place, got.tokens, [c.token for c in choices])
                break
        else:
            assert len(got.tokens) == len(choices)
        assert min(got.margins) >= 0


def test_the_truth_meets_every_kind() -> None:
    """Otherwise the tests below would show little."""
    answers = [[c.token for c in choices] for choices in truth()]
    stopped = [a for a in answers if a[-1] in STOP]
    assert 2 <= len(stopped) < len(answers)
    assert {len(a) for a in answers if a not in stopped} == {NEW}
    kinds = [KINDS[i % len(KINDS)].get("min_tokens", 0) for i in range(len(answers))]
    assert all(len(a) > n for a, n in zip(answers, kinds, strict=True))
    plain = tiny.greedy(C, PROMPTS, NEW)
    assert sum(a != p.tokens[: len(a)] for a, p in zip(answers, plain, strict=True)) == len(answers) - 1


def test_texts_are_those_of_the_contract(engine: eng.Engine) -> None:
    """Greedy and sampled requests side by side; more requests than slots, or other slots than usual."""
    slots = None if engine.batch == 4 else [3 * i + 2 for i in range(len(PROMPTS))]
    answers, _ = tiny.serve(engine, requests(), slots=slots, burst=5)
    check(answers, truth())
    if engine.d_max:
        assert sum(a.accepted for a in answers) > 10 < sum(a.drafted - a.accepted for a in answers)


def test_alone_as_among_others() -> None:
    answers = [tiny.serve(DRAFTS, [r], slots=[2])[0][0] for r in requests()[3:7]]
    check(answers, truth()[3:7])


def test_other_parameters_compile_nothing(engine: eng.Engine) -> None:
    tiny.serve(engine, requests()[:2])
    functions = (tiny.init, tiny.write_chunk, tiny.admit, tiny.run)
    before = [f._cache_size() for f in functions]
    answers, _ = tiny.serve(engine, requests(shift=4))
    check(answers, truth(4))
    assert [f._cache_size() for f in functions] == before


def test_rejected_drafts_leave_no_trace() -> None:
    """Drafts overwritten at random: penalties and min tokens see them while they are verified, and then no more."""
    rng = np.random.default_rng(5)

    def edit(state: eng.State) -> eng.State:
        drafts = jnp.asarray(rng.integers(0, tiny.VOCAB, state.slots.drafts.shape), jnp.int32)
        keep = jnp.asarray(rng.random(drafts.shape) < 0.3)
        return state.replace(slots=state.slots.replace(drafts=jnp.where(keep, state.slots.drafts, drafts)))

    answers, state = tiny.serve(DRAFTS, requests(), burst=1, edit=edit)
    check(answers, truth())
    assert sum(a.drafted - a.accepted for a in answers) > 40
    assert state.sampling is not None
    seen = np.asarray(state.sampling.settings.seen)
    for slot in range(len(PROMPTS)):  # what is counted is what was emitted
        out = np.asarray(state.slots.out[slot, : int(state.slots.emitted[slot])])
        assert np.array_equal(seen[slot] >> 1, np.bincount(out, minlength=tiny.VOCAB))


def test_logprobs_are_the_targets_own() -> None:
    """Of raw logits, of full attention, and only what was emitted."""
    asked = requests()[6:9]
    answers, state = tiny.serve(DRAFTS, asked)
    assert state.sampling is not None and sum(a.accepted for a in answers) > 0
    for slot, (a, r) in enumerate(zip(answers, asked, strict=True)):
        for place, token in enumerate(a.tokens):
            x = logits_after([*r.prompt, *a.tokens[:place]]).astype(np.float64)
            want = x - x.max() - np.log(np.exp(x - x.max()).sum())
            np.testing.assert_allclose(state.sampling.logprob[slot, place], want[token], atol=tiny.TIE)
            best = np.asarray(state.sampling.best_token[slot, place])
            np.testing.assert_allclose(state.sampling.best_logprob[slot, place], want[best], atol=tiny.TIE)
            np.testing.assert_allclose(want[best], np.sort(want)[:-4:-1], atol=tiny.TIE)


def test_greedy_rows_are_exact_beside_rows_that_reject() -> None:
    support = Support(acceptance="rejection")
    engine = tiny.aspire(C, in_step=True, renew="verification", d_max=2, sampling=support)
    mixed = [
        Request(p, NEW, (), tiny.settings(support, seed=i, temperature=float(i % 2))) for i, p in enumerate(PROMPTS)
    ]
    answers, _ = tiny.serve(engine, mixed)
    tiny.assert_same(answers[::2], tiny.greedy(C, PROMPTS[::2], NEW))
    again, _ = tiny.serve(engine, mixed)
    assert [a.tokens for a in again] == [a.tokens for a in answers]
    drafted, accepted = (sum(getattr(a, name) for a in answers[1::2]) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted
    assert all(len(set(a.tokens)) > 3 for a in answers[1::2])
