"""Draft-length policies: when does a row stop drafting and verify?

A policy is a frozen dataclass with pure functions; its state is a pytree the engine carries. `decide` sees the whole
batch, so a policy may let rows go their own ways or keep them in step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.costs import CostModel
from aspire_jax.shapes import Shapes

State = Any
IDLE, DRAFT, VERIFY = 0, 1, 2
# Bounds of options: a verification is a static shape of d_max + 1 tokens a row, and regret is a number of steps.
MOST_DRAFTS, MOST_REGRET = 32, 1e6


class View(NamedTuple):
    """The batch as a policy sees it before a step.

    Attributes:
      active: [B] bool, rows with a request that goes on.
      drafted: [B] drafts held, d.
      limit: [B] most drafts a row may hold now: at most d_max, fewer near its end, 0 while it has no selection.
      lengths: [B] committed tokens.
      selected: [B] float32, tokens a drafting step of the row reads in a layer.
      cost: the cost model.
      shapes: the engine's step shapes (static).
    """

    active: jax.Array
    drafted: jax.Array
    limit: jax.Array
    lengths: jax.Array
    selected: jax.Array
    cost: CostModel
    shapes: Shapes


class Outcome(NamedTuple):
    """What a step did.

    Attributes:
      verified: [B] bool.
      drafts, accepted, emitted: [B] drafts a verifying row held, those it accepted, tokens it emitted; 0 elsewhere.
      confidence: [B] top probability of the draft just made, 0 elsewhere.
      seconds: predicted time of this step; plain_seconds: of a step in which every active row decodes plainly.
      active: [B] bool, as in the view.
    """

    verified: jax.Array
    drafts: jax.Array
    accepted: jax.Array
    emitted: jax.Array
    confidence: jax.Array
    seconds: jax.Array
    plain_seconds: jax.Array
    active: jax.Array


class DraftLengthPolicy(Protocol):
    """The interface."""

    @property
    def d_max(self) -> int:
        """Most drafts a row may hold (static)."""

    def init(self, batch: int) -> State:
        """State of rows of which nothing is known."""

    def decide(self, state: State, view: View) -> jax.Array:
        """Action of each row [B] int32: IDLE, DRAFT or VERIFY.

        The engine turns DRAFT into VERIFY where a row is at its limit, and every action into IDLE where it is not
        active. Some active row must act.
        """

    def update(self, state: State, outcome: Outcome) -> State:
        """Takes in what the step did."""

    def forget(self, state: State, rows: jax.Array) -> State:
        """Resets the rows [B] bool that a new request takes over."""


def in_step(wants: jax.Array) -> jax.Array:
    """Actions [B] of rows that march together: those that want a draft make it, the others wait, then all verify."""
    return jnp.where(wants, DRAFT, jnp.where(jnp.any(wants), IDLE, VERIFY)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDraft:
    """Every step verifies nothing but the pending token: plain decoding."""

    @property
    def d_max(self) -> int:
        return 0

    def init(self, batch: int) -> State:
        return ()

    def decide(self, state: State, view: View) -> jax.Array:
        return jnp.full(view.active.shape, VERIFY, jnp.int32)

    def update(self, state: State, outcome: Outcome) -> State:
        return state

    def forget(self, state: State, rows: jax.Array) -> State:
        return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedDraftLength:
    """Every row drafts `gamma` tokens, then verifies; rows keep in step (the synchronised baselines)."""

    gamma: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.gamma <= MOST_DRAFTS:
            raise ValueError(f"gamma: {self.gamma}, expected 1 to {MOST_DRAFTS}")

    @property
    def d_max(self) -> int:
        return self.gamma

    def init(self, batch: int) -> State:
        return ()

    def decide(self, state: State, view: View) -> jax.Array:
        wants = view.active & (view.drafted < view.limit)
        return in_step(wants)

    def update(self, state: State, outcome: Outcome) -> State:
        return state

    def forget(self, state: State, rows: jax.Array) -> State:
        return state


def expected_tokens(alpha: jax.Array, gamma: jax.Array) -> jax.Array:
    """Tokens a verification of `gamma` drafts yields when each is accepted with probability `alpha`.

    (1 - alpha^(gamma + 1)) / (1 - alpha), its limit gamma + 1 where alpha is near 1.
    """
    near_one = alpha > np.float32(1 - 1e-4)
    safe = jnp.where(near_one, np.float32(0.5), alpha)
    return jnp.where(near_one, gamma + 1, (1 - safe ** (gamma + 1)) / (1 - safe))


@flax.struct.dataclass
class AspireState:
    """State of `AspireDraftLength`.

    Attributes:
      alpha: [B] smoothed acceptance rate.
      seen: [B] bool, whether a verification of drafts was seen.
      spent: seconds all steps so far should have taken; earned: seconds plain decoding would have taken for the same
        tokens. Scalars, by the cost model.
    """

    alpha: jax.Array
    seen: jax.Array
    spent: jax.Array
    earned: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class AspireDraftLength:
    """ASPIRE's scheduler and estimator (arXiv 2609.17943, section 4), with two additions of ours.

    Each row drafts until the gamma that maximises expected tokens per time under its acceptance rate alpha.

    `in_step`: rows share one gamma, chosen for the batch, draft together and verify together. The paper's rule takes
    the batch as copies of one row and lets rows drift apart, which wins where bytes are scarce (GPUs) and loses where
    arithmetic is (CPUs: a mixed step pays for the widest of everything). None follows the implementation.

    `regret_share`, `regret_steps`: no row starts a new draft while speculation has lost more than this share of the
    time, plus this many plain steps, against plain decoding. None for the share: the paper's rule alone.

    Attributes:
      d_max: most drafts a row may hold.
      gamma_init: drafts before the first verification.
      w: weight of the old alpha in the moving average.
      alpha_0: acceptance rate assumed at first.
    """

    d_max: int = 16
    gamma_init: int = 3
    w: float = 0.8
    alpha_0: float = 0.9
    in_step: bool | None = None
    regret_share: float | None = 0.01
    regret_steps: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.d_max <= MOST_DRAFTS:
            raise ValueError(f"d_max: {self.d_max}, expected 1 to {MOST_DRAFTS}")
        if not 0 <= self.gamma_init <= self.d_max:
            raise ValueError(f"gamma_init: {self.gamma_init}, expected 0 to d_max ({self.d_max})")
        for name, value in (("regret_share", self.regret_share), ("regret_steps", self.regret_steps)):
            if value is not None and not 0 <= value <= MOST_REGRET:
                raise ValueError(f"{name}: {value}, expected 0 to {MOST_REGRET:g}")
        for name in ("w", "alpha_0"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)}, expected a number between 0 and 1")

    def init(self, batch: int) -> AspireState:
        zero = jnp.zeros((), jnp.float32)
        return AspireState(
            alpha=jnp.full((batch,), self.alpha_0, jnp.float32),
            seen=jnp.zeros((batch,), bool),
            spent=zero,
            earned=zero,
        )

    def decide(self, state: AspireState, view: View) -> jax.Array:
        gamma = self._shared_gamma(state, view) if self.in_step else self._own_gamma(state, view)
        blocked = ~self._worth_trying(state, view) & (view.drafted == 0)
        wants = view.active & (view.drafted < jnp.minimum(jnp.where(blocked, 0, gamma), view.limit))
        if self.in_step:
            return in_step(wants)
        return jnp.where(wants, DRAFT, VERIFY).astype(jnp.int32)

    def update(self, state: AspireState, outcome: Outcome) -> AspireState:
        measured = outcome.verified & (outcome.drafts > 0)
        tried = jnp.minimum(outcome.accepted + 1, outcome.drafts)
        rate = outcome.accepted.astype(jnp.float32) / jnp.maximum(tried, 1).astype(jnp.float32)
        alpha = np.float32(self.w) * state.alpha + np.float32(1 - self.w) * rate
        rows = jnp.maximum(jnp.sum(outcome.active), 1).astype(jnp.float32)
        plain_steps = jnp.sum(outcome.emitted).astype(jnp.float32) / rows
        return AspireState(
            alpha=jnp.where(measured, alpha, state.alpha),
            seen=state.seen | measured,
            spent=state.spent + outcome.seconds,
            earned=state.earned + plain_steps * outcome.plain_seconds,
        )

    def forget(self, state: AspireState, rows: jax.Array) -> AspireState:
        return dataclasses.replace(
            state, alpha=jnp.where(rows, np.float32(self.alpha_0), state.alpha), seen=jnp.where(rows, False, state.seen)
        )

    def _own_gamma(self, state: AspireState, view: View) -> jax.Array:
        """The paper's rule: [B] gamma, every row taking the batch as copies of itself."""
        batch = view.active.shape[0]
        length, selected = view.lengths.astype(jnp.float32), view.selected
        drafting = jnp.broadcast_to(True, (batch,))
        gammas = jnp.arange(self.d_max + 1, dtype=jnp.int32)

        def row(alpha: jax.Array, length: jax.Array, selected: jax.Array) -> jax.Array:
            lengths, chosen = jnp.broadcast_to(length, (batch,)), jnp.broadcast_to(selected, (batch,))
            ones = jnp.ones((batch,), jnp.int32)
            draft = view.cost.seconds(view.shapes.forecast(drafting, ones, lengths.astype(jnp.int32), chosen))

            def verify(g: jax.Array) -> jax.Array:
                work = view.shapes.forecast(~drafting, ones * (g + 1), lengths.astype(jnp.int32), chosen)
                return view.cost.seconds(work)

            g = gammas.astype(jnp.float32)
            rate = expected_tokens(alpha, g) / (g * draft + jax.vmap(verify)(gammas))
            return jnp.argmax(rate).astype(jnp.int32)

        gamma = jax.vmap(row)(state.alpha, length, selected)
        return jnp.where(state.seen, gamma, self.gamma_init)

    def _shared_gamma(self, state: AspireState, view: View) -> jax.Array:
        """The gamma that maximises the whole batch's expected tokens per time when all rows keep in step."""
        gammas = jnp.arange(self.d_max + 1, dtype=jnp.int32)

        def rate(g: jax.Array) -> jax.Array:
            held = jnp.where(view.active, jnp.minimum(g, view.limit), 0)
            tokens = jnp.where(view.active, expected_tokens(state.alpha, held.astype(jnp.float32)), 0.0)
            ones = view.active.astype(jnp.int32)
            draft = view.shapes.forecast(view.active, ones, view.lengths, view.selected)
            verify = view.shapes.forecast(jnp.zeros_like(view.active), ones * (held + 1), view.lengths, view.selected)
            most = jnp.max(held).astype(jnp.float32)
            copy = view.shapes.copy(view.selected) * jnp.minimum(most, np.float32(1.0))
            time = most * view.cost.seconds(draft) + view.cost.seconds(verify + copy)
            return jnp.sum(tokens) / time

        best = jnp.argmax(jax.vmap(rate)(gammas)).astype(jnp.int32)
        # Before the first verification gamma_init only bounds what the costs and alpha_0 say: where drafting cannot
        # pay, it must not cost anything either.
        return jnp.where(jnp.any(state.seen & view.active), best, jnp.minimum(best, self.gamma_init))

    def _worth_trying(self, state: AspireState, view: View) -> jax.Array:
        """Whether speculation has lost little enough so far to be tried again; scalar bool."""
        if self.regret_share is None:
            return jnp.asarray(True)
        ones = view.active.astype(jnp.int32)
        plain = view.cost.seconds(view.shapes.forecast(jnp.zeros_like(view.active), ones, view.lengths, view.selected))
        rows = jnp.maximum(jnp.sum(ones), 1).astype(jnp.float32)
        held = expected_tokens(state.alpha, view.drafted.astype(jnp.float32)) - 1
        hoped = jnp.sum(jnp.where(view.active, held, 0.0)) / rows * plain
        lost = state.spent - state.earned - hoped
        return lost <= np.float32(self.regret_share) * state.earned + np.float32(self.regret_steps) * plain
