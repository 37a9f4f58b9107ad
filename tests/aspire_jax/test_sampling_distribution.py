"""Both kinds of acceptance follow the target's distribution: chi-square over 204,800 draws per set of parameters.

p and q are a tiny model's, after a whole prompt and after its last tokens alone, as a sparse draft would see it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from aspire_jax import model
from aspire_jax.sampling import draw
from aspire_jax.sampling import rows as sampling_rows
from aspire_jax.sampling.rows import Settings, Support

from . import sampling_reference as reference
from . import tiny

C = tiny.config(vocab_size=24)
V, BATCH, ROUNDS = C.vocab_size, 2048, 100
PROMPT = [3, 17, 9, 22, 5, 5, 11, 20, 8, 14, 2, 19]
ANSWER = [7, 12, 7]  # emitted before the tokens that are drawn here
STOP = [10, 4]
SUPPORT = {name: Support(acceptance=name, penalties=True, bias=True) for name in sampling_rows.ACCEPTANCES}
SETS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 2, top-k": {"temperature": 2.0, "top_k": 9},
    "top-p": {"top_p": 0.8},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "penalties": {"repetition": 1.6, "presence": 0.4, "frequency": -0.3},
    "bias, min tokens": {"bias": np.linspace(-2, 2, V), "min_tokens": 5},
    "all": {
        "temperature": 1.4, "top_k": 16, "top_p": 0.95, "min_p": 0.02, "repetition": 1.2, "presence": 0.3,
        "frequency": 0.2, "bias": np.linspace(1, -1, V), "min_tokens": 4,
    },
}  # fmt: skip


def settings_of(fields: dict[str, Any]) -> Settings:
    seen = np.zeros(V, np.int32)
    seen[PROMPT] = 1
    for token in ANSWER:
        seen[token] += 2
    return tiny.settings(SUPPORT["coupled"], vocabulary=V, seen=seen, **{"temperature": 1.0, **fields})


@functools.cache
def logits() -> np.ndarray:
    """[3, V]: the target's after the prompt, the draft's there, the target's one token on."""
    dense = jax.jit(model.dense_logits, static_argnums=0)
    weights = tiny.weights(C)
    p, q = (dense(C, weights, jnp.asarray(x))[-1] for x in (PROMPT, PROMPT[-8:]))
    return np.stack([p, 0.4 * q + 0.6 * p, dense(C, weights, jnp.asarray([*PROMPT, 1]))[-1]])


class Counts(NamedTuple):
    """Tokens drawn first [V]; drafts and then accepted drafts by token [V]; tokens drawn second, by draft [V, V]."""

    first: jax.Array
    drafts: jax.Array
    accepted: jax.Array
    second: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def _count(support: Support, s: Settings, logits: jax.Array, seed: jax.Array) -> Counts:
    """Drafts a token in each row and verifies it, ROUNDS times."""
    settings = jax.tree.map(lambda x: jnp.broadcast_to(x, (BATCH, *x.shape)), s)
    row = jnp.arange(BATCH, dtype=jnp.int32)
    none = jnp.zeros((BATCH,), jnp.int32)
    empty = sampling_rows.init(support, V, BATCH, 1, 1)
    stop = jnp.broadcast_to(jnp.asarray([*STOP, -1], jnp.int32), (BATCH, 3))
    emitted, length = none + len(ANSWER), none + len(PROMPT) + len(ANSWER) - 1

    def step(sampling: Any, rows: Any, logits: jax.Array, places: int) -> tuple[Any, jax.Array]:
        t = BATCH * places
        packed = draw.Packed(
            jnp.tile(logits, (BATCH, 1)),
            jnp.repeat(row, places),
            jnp.tile(jnp.arange(places), BATCH),
            jnp.ones(t, bool),
        )
        sampling, drawn = draw.draw(
            support, sampling, packed, rows, jnp.int32(places), jnp.zeros(t, jnp.int32), jnp.zeros(t)
        )
        return sampling, drawn.token.reshape(BATCH, places)

    def one(i: jax.Array, counts: Counts) -> Counts:
        number = (i * BATCH + row).astype(jnp.uint32)
        keys = jnp.stack([jnp.full((BATCH,), seed, jnp.uint32), number], axis=1)
        sampling = empty.replace(settings=settings.replace(key=keys))
        rows = draw.Rows(none == 0, none[:, None], none, length, emitted, stop)
        sampling, draft = step(sampling, rows, logits[1:2], 1)
        rows = draw.Rows(none > 0, draft, none + 1, length, emitted, stop)
        _, tokens = step(sampling, rows, logits[::2], 2)
        accepted = (tokens[:, 0] == draft[:, 0]).astype(jnp.int32)
        return Counts(
            counts.first.at[tokens[:, 0]].add(1),
            counts.drafts.at[draft[:, 0]].add(1),
            counts.accepted.at[draft[:, 0]].add(accepted),
            counts.second.at[draft[:, 0], tokens[:, 1]].add(accepted),
        )

    zero = jnp.zeros((V,), jnp.int32)
    return jax.lax.fori_loop(0, ROUNDS, one, Counts(zero, zero, zero, jnp.zeros((V, V), jnp.int32)))


@functools.cache
def counts(acceptance: sampling_rows.Acceptance, name: str) -> Counts:
    seed = list(SETS).index(name)
    made = _count(SUPPORT[acceptance], settings_of(SETS[name]), jnp.asarray(logits()), jnp.uint32(seed))
    return Counts(*(np.asarray(x, np.int64) for x in made))


def exact(name: str) -> tuple[np.ndarray, np.ndarray, Settings]:
    s = settings_of(SETS[name])
    p, q = (reference.probabilities(s, reference.processed(s, logits()[i], PROMPT, ANSWER, STOP)) for i in (0, 1))
    return p, q, s


def check(observed: np.ndarray, p: np.ndarray) -> None:
    """Chi-square at one in 100,000; tokens of which fewer than five are expected count together."""
    assert observed[p == 0].sum() == 0
    expected = p * observed.sum()
    often = expected >= 5
    o, e = ([*x[often], x[~often].sum()] for x in (observed, expected))
    if e[-1] < 5:
        o, e = [*o[:-2], o[-2] + o[-1]], [*e[:-2], e[-2] + e[-1]]
    found = float(sum((a - b) ** 2 / b for a, b in zip(o, e, strict=True)))
    assert stats.chi2.sf(found, max(1, len(e) - 1)) > 1e-5, (observed, expected)


both = pytest.mark.parametrize("acceptance", sampling_rows.ACCEPTANCES)
every_set = pytest.mark.parametrize("name", SETS)


@both
@every_set
def test_the_first_token_follows_the_target(acceptance: sampling_rows.Acceptance, name: str) -> None:
    c, (p, q, _) = counts(acceptance, name), exact(name)
    assert c.first.sum() == BATCH * ROUNDS >= 200_000
    assert 0.05 < np.abs(p - q).sum() / 2 < 0.9  # drafts are neither right nor hopeless
    check(c.first, p)
    check(c.drafts, q)


@both
@every_set
def test_the_token_after_an_accepted_draft_follows_the_target(acceptance: Any, name: str) -> None:
    """The draft counts as emitted: penalties and min tokens know it."""
    c, (_, _, s) = counts(acceptance, name), exact(name)
    for draft in np.argsort(c.accepted)[-3:]:
        x = reference.processed(s, logits()[2], PROMPT, [*ANSWER, int(draft)], STOP)
        assert c.accepted[draft] > 2000
        check(c.second[draft], reference.probabilities(s, x))


@every_set
def test_acceptance_beside_total_variation(name: str) -> None:
    """Rejection accepts 1 - TV of the drafts, the most that is possible; coupling what Gumbel noise shared by p and q
    gives: sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i), no less than (1 - TV) / (1 + TV)."""
    p, q, _ = exact(name)
    most = 1 - np.abs(p - q).sum() / 2
    either = (p > 0) & (q > 0)
    shared = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in np.flatnonzero(either))
    assert most >= shared >= most / (2 - most) - 1e-9
    for acceptance, expected in (("rejection", most), ("coupled", shared)):
        rate = counts(acceptance, name).accepted.sum() / (BATCH * ROUNDS)
        assert abs(rate - expected) < 5 * np.sqrt(expected * (1 - expected) / (BATCH * ROUNDS)), acceptance
    assert counts("rejection", name).accepted.sum() > counts("coupled", name).accepted.sum()
