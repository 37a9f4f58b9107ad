"""Policies of a user's own against the interfaces alone: random decisions, several refresh layers, a set a layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng
from aspire_jax.config import ModelConfig
from aspire_jax.context import Plan, RefreshContext, Room, Scores, best_pages, pages_of
from aspire_jax.draft_length import DRAFT, IDLE, VERIFY, FixedDraftLength, Outcome, View

from . import tiny
from .tiny import Request

MODEL = next(iter(tiny.MODELS.values()))
DEEP = tiny.config(layers=4)
NEW = 24
PROMPTS = tiny.prompts((1, 2, 13, 40, 7, 30))


@flax.struct.dataclass
class Dice:
    """The random numbers still to come, and what the policy was told: verified drafts and emitted tokens [B]."""

    key: jax.Array
    drafts: jax.Array
    emitted: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomDraftLength:
    """Rows draft, verify or wait by the dice, whether they hold drafts or not."""

    d_max: int = 3
    seed: int = 0
    idle: float = 0.2
    draft: float = 0.5

    def init(self, batch: int) -> Dice:
        return Dice(jax.random.key(self.seed), *jnp.zeros((2, batch), jnp.int32))

    def decide(self, state: Dice, view: View) -> jax.Array:
        u = jax.random.uniform(state.key, view.active.shape)
        action = jnp.where(u < np.float32(self.idle + self.draft), DRAFT, VERIFY)
        return jnp.where(u < np.float32(self.idle), IDLE, action).astype(jnp.int32)

    def update(self, state: Dice, outcome: Outcome) -> Dice:
        return Dice(jax.random.fold_in(state.key, 1), state.drafts + outcome.drafts, state.emitted + outcome.emitted)

    def forget(self, state: Dice, rows: jax.Array) -> Dice:
        return state.replace(drafts=jnp.where(rows, 0, state.drafts), emitted=jnp.where(rows, 0, state.emitted))


def random_engine(c: ModelConfig, **fields: Any) -> eng.Engine:
    context = RefreshContext(k_min=3, recent=1, rho=0.1, renew=fields.pop("renew", "step"))
    return tiny.make(c, context, RandomDraftLength(d_max=fields.pop("d_max")), **fields)


MIXED = {
    "dense": random_engine(MODEL, d_max=1),
    "packed, scanned, shuffled": random_engine(
        tiny.config(layers=3), d_max=3, dense=False, unrolled=False, consecutive=False, renew="verification"
    ),
}


@pytest.mark.parametrize("engine", MIXED.values(), ids=MIXED)
def test_random_decisions_change_nothing(engine: eng.Engine) -> None:
    """Whatever the schedule: six requests on four slots, ten schedules."""
    truth, taken = tiny.greedy(engine.config, PROMPTS, NEW), np.zeros(len(engine.shapes.all), int)
    for seed in range(10):
        state = tiny.start(engine)
        state = state.replace(draft_length=state.draft_length.replace(key=jax.random.key(seed)))
        answers, state = tiny.serve(engine, [Request(p) for p in PROMPTS], state=state, burst=1 + 50 * seed)
        tiny.assert_same(answers, truth)
        for a in answers:
            assert a.steps == a.drafted + a.verifications
            assert len(a.tokens) == a.accepted + a.verifications == NEW
        taken += np.asarray(state.shape_steps)
        dice = state.draft_length
        assert np.array_equal(dice.emitted, state.slots.emitted)
        assert np.array_equal(dice.drafts, state.slots.drafted_total)
    assert (taken > 0).sum() >= 3


def test_random_decisions_where_rows_may_not_mix() -> None:
    """An engine without mixed shapes does not trust its policy to keep rows in step: no verification is lost."""
    engine = random_engine(MODEL, d_max=2, mixed=False)
    answers, state = tiny.serve(engine, [Request(p) for p in PROMPTS])
    tiny.assert_same(answers, tiny.greedy(engine.config, PROMPTS, NEW))
    for a in answers:
        assert a.steps == a.drafted + a.verifications
    assert np.array_equal(state.draft_length.drafts, state.slots.drafted_total)


@flax.struct.dataclass
class PerHead:
    """Page scores of every layer and KV head [L, B, Hkv, P]; how often each row's were taken in [L, B]."""

    mass: jax.Array
    observed: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayeredContext:
    """Several refresh layers, each serving the layers behind it within the step; a set a layer from KV-head scores.

    Layer i reads the pages scored by the last refresh layer before it, blended with its own at the last verification.
    """

    refresh: tuple[int, ...] = (1, 2)
    budget: int = 3
    same_step: bool = True

    def plan(self, config: ModelConfig) -> Plan:
        layers = tuple(range(config.n_layers))
        return Plan(
            verify_layers=layers,
            refresh_layers=self.refresh,
            heads="kv",
            sets=layers,
            same_step=self.same_step,
            renew="step",
        )

    def capacity(self, room: Room) -> int:
        return min(room.pages, self.budget)

    def init(self, config: ModelConfig, batch: int, room: Room) -> PerHead:
        shape = (config.n_layers, batch, config.n_kv_heads, room.pages)
        return PerHead(jnp.zeros(shape, jnp.float32), jnp.zeros((config.n_layers, batch), jnp.int32))

    def observe(self, state: PerHead, scores: Scores) -> PerHead:
        assert scores.mass.shape == (len(scores.layers), *state.mass.shape[1:])
        mass, observed = state.mass, state.observed
        for i, layer in enumerate(scores.layers):
            rows = scores.rows[i]
            mass = mass.at[layer].set(jnp.where(rows[:, None, None], scores.mass[i], mass[layer]))
            observed = observed.at[layer].add(rows.astype(jnp.int32))
        return PerHead(mass, observed)

    def select(self, state: PerHead, lengths: jax.Array, room: Room) -> jax.Array:
        layers = state.mass.shape[0]
        source = [max((r for r in self.refresh if r < i), default=i) for i in range(layers)]
        blended = jnp.max(state.mass + state.mass[jnp.asarray(source)], axis=2)
        used = pages_of(lengths, room.page_size)
        budget = jnp.full(lengths.shape, self.budget, jnp.int32)
        return jnp.stack([best_pages(m, used, budget, 1, self.capacity(room)) for m in blended])

    def forget(self, state: PerHead, rows: jax.Array) -> PerHead:
        return PerHead(
            jnp.where(rows[None, :, None, None], np.float32(0), state.mass),
            jnp.where(rows[None], 0, state.observed),
        )


LAYERED = {
    "in step": tiny.make(
        tiny.config(layers=3),
        LayeredContext(refresh=(0, 1)),
        FixedDraftLength(gamma=2),
        mixed=False,
        consecutive=False,
        unrolled=True,
    ),
    "mixed, scanned": tiny.make(
        DEEP, LayeredContext(refresh=(2,)), RandomDraftLength(d_max=2, idle=0.1), dense=False, unrolled=False
    ),
}


@pytest.mark.parametrize("engine", LAYERED.values(), ids=LAYERED)
def test_several_refresh_layers_and_sets(engine: eng.Engine) -> None:
    c, plan = engine.config, engine.plan
    answers, state = tiny.serve(engine, [Request(p) for p in PROMPTS])
    tiny.assert_same(answers, tiny.greedy(c, PROMPTS, NEW))
    assert sum(a.accepted for a in answers) > 0
    assert sum(a.drafted - a.accepted for a in answers) > 0
    selection = np.asarray(state.selection)
    assert selection.shape == (c.n_layers, engine.batch, 3)
    assert plan.n_sets == c.n_layers
    assert any(sorted(selection[0, row]) != sorted(selection[-1, row]) for row in range(engine.batch))
    # Softmax mass within the committed tokens: no head's adds up to more than one.
    mass = np.asarray(state.context.mass).sum(axis=-1)
    assert mass.min() >= 0
    assert mass.max() <= 1 + 1e-5


@pytest.mark.parametrize("engine", LAYERED.values(), ids=LAYERED)
def test_every_measurement_is_observed_once(engine: eng.Engine) -> None:
    """A policy that averages must see a step's scores once: a draft's in refresh layers, a verification's in all."""
    answers, state = tiny.serve(engine, [Request(p) for p in PROMPTS[:4]])
    observed = np.asarray(state.context.observed)
    for row, a in enumerate(answers):
        want = [a.verifications + a.drafted * (i in engine.plan.refresh_layers) for i in range(engine.config.n_layers)]
        assert observed[:, row].tolist() == want
