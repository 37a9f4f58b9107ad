"""ASPIRE's draft length: as many drafts as pay, by a cost model and a smoothed acceptance rate."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.draft_length import regret
from aspire_jax.draft_length.interface import DRAFT, MOST_DRAFTS, VERIFY, Outcome, View, in_step


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
      ledger: what speculation has cost and brought so far.
    """

    alpha: jax.Array
    seen: jax.Array
    ledger: regret.Ledger


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
            if value is not None and not 0 <= value <= regret.MOST:
                raise ValueError(f"{name}: {value}, expected 0 to {regret.MOST:g}")
        for name in ("w", "alpha_0"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)}, expected a number between 0 and 1")

    @property
    def pauses(self) -> bool:
        return True

    def init(self, batch: int) -> AspireState:
        return AspireState(
            alpha=jnp.full((batch,), self.alpha_0, jnp.float32),
            seen=jnp.zeros((batch,), bool),
            ledger=regret.empty(),
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
        return AspireState(
            alpha=jnp.where(measured, alpha, state.alpha),
            seen=state.seen | measured,
            ledger=regret.entered(state.ledger, outcome),
        )

    def forget(self, state: AspireState, rows: jax.Array) -> AspireState:
        return dataclasses.replace(
            state, alpha=jnp.where(rows, np.float32(self.alpha_0), state.alpha), seen=jnp.where(rows, False, state.seen)
        )

    def _own_gamma(self, state: AspireState, view: View) -> jax.Array:
        """The paper's rule: [B] gamma, every row taking the active ones as copies of itself."""
        gammas = jnp.arange(self.d_max + 1, dtype=jnp.int32)
        ones, nobody = view.active.astype(jnp.int32), jnp.zeros_like(view.active)

        def row(alpha: jax.Array, length: jax.Array, selected: jax.Array) -> jax.Array:
            lengths, chosen = jnp.broadcast_to(length, ones.shape), jnp.broadcast_to(selected, ones.shape)
            draft = view.cost.seconds(view.shapes.forecast(view.active, ones, lengths, chosen))

            def verify(g: jax.Array) -> jax.Array:
                return view.cost.seconds(view.shapes.forecast(nobody, ones * (g + 1), lengths, chosen))

            g = gammas.astype(jnp.float32)
            rate = expected_tokens(alpha, g) / (g * draft + jax.vmap(verify)(gammas))
            return jnp.argmax(rate).astype(jnp.int32)

        gamma = jax.vmap(row)(state.alpha, view.lengths, view.selected)
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
        held = expected_tokens(state.alpha, view.drafted.astype(jnp.float32)) - 1
        hoped = jnp.sum(jnp.where(view.active, held, 0.0))
        return regret.may_try(state.ledger, view, hoped, self.regret_share, self.regret_steps)
