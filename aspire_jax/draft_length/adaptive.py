"""Our draft length: whatever yields the most tokens per second for the whole batch.

ASPIRE's rule (aspire.py) maximises each row's own tokens per time as if the batch were copies of it, from one smoothed
rate. This one looks for what the batch as a whole gains. It knows the batch's present tokens per second, lambda: time
is worth lambda tokens a second, and of all that the rows may do until they verify the most valuable is
tokens - lambda * time (Dinkelbach's method for a ratio: at the best lambda the best value is zero). Held drafts count
with what their own confidence says, so a doubtful draft ends its row's drafting.

Two plans are compared. Marching: all rows draft and verify together. Mixing: every row verifies when it pays for that
row; only where the engine has step shapes for it. Both are priced with the shapes the engine has, so on a machine where
a mixed step pays for the widest of everything marching wins, and where bytes are scarce mixing does. Not drafting at
all is a plan of either.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.draft_length import likelihood, regret
from aspire_jax.draft_length.aspire import expected_tokens
from aspire_jax.draft_length.interface import DRAFT, MOST_DRAFTS, VERIFY, Outcome, View, in_step
from aspire_jax.draft_length.likelihood import Likelihood

# Share of the past that a step leaves: in lambda's sums, and in the ledger.
_PACE, _LEDGER = 0.99, 0.999
# Plain steps after which one draft is made to see how things stand, if the ledger allows.
_PROBE = 64


@flax.struct.dataclass
class AdaptiveState:
    """State of `AdaptiveDraftLength`.

    Attributes:
      likelihood: how likely drafts are to be accepted.
      kind: [B, d_max] class of each held draft's confidence; made: [B] drafts held.
      tokens, seconds: scalars, fading sums over the steps so far: tokens per active row, and time. Their ratio times
        the rows is lambda; by row, so that a batch whose rows end one by one does not value time by what more rows made
        of it.
      ledger: what speculation has cost and brought.
    """

    likelihood: Likelihood
    kind: jax.Array
    made: jax.Array
    tokens: jax.Array
    seconds: jax.Array
    ledger: regret.Ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveDraftLength:
    """Drafts while that raises the batch's tokens per second.

    Attributes:
      d_max: most drafts a row may hold.
      alpha_0: acceptance rate assumed before anything was seen.
      keep: share of a row's past that a verification leaves; what it learned fades over about 1 / (1 - keep) of them.
      regret_share, regret_steps: speculation stops while it has lost more than this share of the time, plus this many
        plain steps, against plain decoding.
      confidence: whether held drafts count by their margin; otherwise by their row's rate.
    """

    d_max: int = 16
    alpha_0: float = 0.8
    keep: float = 0.9
    regret_share: float = 0.01
    regret_steps: float = 1.0
    confidence: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.d_max <= MOST_DRAFTS:
            raise ValueError(f"d_max: {self.d_max}, expected 1 to {MOST_DRAFTS}")
        for name in ("alpha_0", "keep"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, expected a number from 0 to less than 1")
        for name in ("regret_share", "regret_steps"):
            if not 0 <= getattr(self, name) <= regret.MOST:
                raise ValueError(f"{name}: {getattr(self, name)}, expected 0 to {regret.MOST:g}")

    @property
    def signals(self) -> tuple[str, ...]:
        return ("margin",) if self.confidence else ()

    @property
    def pauses(self) -> bool:
        return True

    def init(self, batch: int) -> AdaptiveState:
        zero = jnp.zeros((), jnp.float32)
        return AdaptiveState(
            likelihood=likelihood.unknown(batch),
            kind=jnp.zeros((batch, self.d_max), jnp.int32),
            made=jnp.zeros((batch,), jnp.int32),
            tokens=zero,
            seconds=zero,
            ledger=regret.empty(),
        )

    def decide(self, state: AdaptiveState, view: View) -> jax.Array:
        hoped, survival, alpha = self._hopes(state, view)
        plain = regret.plain_seconds(view)
        rows = jnp.maximum(jnp.sum(view.active), 1).astype(jnp.float32)
        # Plain decoding is always to be had, so time is never worth less.
        pace = rows * jnp.maximum(state.tokens / jnp.maximum(state.seconds, 1e-30), 1 / plain)
        tokens = self._tokens(view, hoped, survival, alpha)
        allowed = regret.may_try(state.ledger, view, jnp.sum(hoped), self.regret_share, self.regret_steps)
        allowed |= jnp.any(view.drafted > 0)
        march, march_gain = self._march(view, tokens, pace)
        action = in_step(march & allowed)
        if view.shapes.mixed:
            mix, mix_gain = self._mix(view, tokens, pace)
            wants = mix & (allowed | (view.drafted > 0))
            action = jnp.where(mix_gain >= march_gain, jnp.where(wants, DRAFT, VERIFY), action)
        # Plain steps are all alike and tell nothing of what drafting would cost or yield by now.
        probe = (view.idle >= _PROBE) & allowed & ~jnp.any(view.drafted > 0)
        return jnp.where(probe, in_step(view.active & (view.limit > 0)), action).astype(jnp.int32)

    def update(self, state: AdaptiveState, outcome: Outcome) -> AdaptiveState:
        after = likelihood.learned(
            state.likelihood, state.kind, outcome.verified, outcome.drafts, outcome.accepted, self.keep
        )
        place = jnp.arange(self.d_max, dtype=jnp.int32)[None] == state.made[:, None]
        kind = likelihood.class_of(outcome.signals.margin)
        rows = jnp.maximum(jnp.sum(outcome.active), 1).astype(jnp.float32)
        return AdaptiveState(
            likelihood=after,
            kind=jnp.where(place & outcome.drafted[:, None], kind[:, None], state.kind),
            made=jnp.where(outcome.verified, 0, state.made + outcome.drafted.astype(jnp.int32)),
            tokens=np.float32(_PACE) * state.tokens + jnp.sum(outcome.emitted).astype(jnp.float32) / rows,
            seconds=np.float32(_PACE) * state.seconds + outcome.seconds,
            ledger=regret.entered(state.ledger, outcome, _LEDGER),
        )

    def forget(self, state: AdaptiveState, rows: jax.Array) -> AdaptiveState:
        return dataclasses.replace(
            state,
            likelihood=likelihood.forgotten(state.likelihood, rows),
            made=jnp.where(rows, 0, state.made),
        )

    def _hopes(self, state: AdaptiveState, view: View) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B] drafts held that should be accepted, probability that all are, and that the next one would be."""
        alpha = likelihood.rate(state.likelihood, self.alpha_0)
        p = (
            likelihood.held(state.likelihood, state.kind)
            if self.confidence
            else jnp.repeat(alpha[:, None], self.d_max, 1)
        )
        counts = jnp.arange(self.d_max, dtype=jnp.int32)[None] < view.drafted[:, None]
        survival = jnp.cumprod(jnp.where(counts, p, 1.0), axis=1)
        hoped = jnp.sum(jnp.where(counts, survival, 0.0), axis=1)
        active = view.active.astype(jnp.float32)
        return hoped * active, survival[:, -1], alpha

    def _tokens(self, view: View, hoped: jax.Array, survival: jax.Array, alpha: jax.Array) -> jax.Array:
        """[B, d_max + 1] tokens a row should emit when it verifies with so many drafts (at least those held)."""
        more = jnp.arange(self.d_max + 1, dtype=jnp.int32)[None] - view.drafted[:, None]
        more = jnp.clip(more, 0, jnp.maximum(view.limit - view.drafted, 0)[:, None]).astype(jnp.float32)
        a = alpha[:, None]
        ahead = survival[:, None] * (expected_tokens(a, more) - 1)
        return jnp.where(view.active[:, None], 1 + hoped[:, None] + ahead, 0.0)

    def _march(self, view: View, tokens: jax.Array, pace: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Marching: rows [B] bool that draft now, and the plan's value in tokens."""
        ones, nobody = view.active.astype(jnp.int32), jnp.zeros_like(view.active)
        lead = jnp.max(jnp.where(view.active, view.drafted, 0))
        draft = view.cost.seconds(view.shapes.forecast(view.active, ones, view.lengths, view.selected))
        copy = jnp.where(lead == 0, view.cost.seconds(view.shapes.copy(view.selected)), 0.0)

        def value(g: jax.Array) -> jax.Array:
            held = jnp.minimum(jnp.maximum(g, view.drafted), jnp.maximum(view.limit, view.drafted))
            work = view.shapes.forecast(nobody, ones * (held + 1), view.lengths, view.selected)
            steps = jnp.max(jnp.where(view.active, held - view.drafted, 0)).astype(jnp.float32)
            seconds = view.cost.seconds(work) + steps * draft + copy * jnp.minimum(steps, 1.0)
            return jnp.sum(tokens[:, g]) - pace * seconds

        lengths = jnp.arange(self.d_max + 1, dtype=jnp.int32)
        values = jnp.where(lengths >= lead, jax.vmap(value)(lengths), -jnp.inf)
        best = jnp.argmax(values).astype(jnp.int32)
        return view.active & (view.drafted < jnp.minimum(best, view.limit)), jnp.max(values)

    def _mix(self, view: View, tokens: jax.Array, pace: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mixing: rows [B] bool that draft now, and the plan's value in tokens.

        A row's price is its share of a step that is as wide as it needs to be: stairs are paid by who climbs them.
        """
        step, token, read, pair = (view.cost.b[i] for i in range(4))
        rows = jnp.maximum(jnp.sum(view.active), 1).astype(jnp.float32)
        length = view.lengths.astype(jnp.float32)
        context = view.selected + np.float32(view.shapes.refreshes) * length
        draft = step / rows + token + (read + pair) * context
        g = jnp.arange(self.d_max + 1, dtype=jnp.int32)[None]
        more = jnp.maximum(g - view.drafted[:, None], 0).astype(jnp.float32)
        queries = (jnp.maximum(g, view.drafted[:, None]) + 1).astype(jnp.float32)
        verify = step / rows + token * queries + (read + pair * queries) * length[:, None]
        values = tokens - pace * (verify + more * draft[:, None])
        values = jnp.where(
            (g >= view.drafted[:, None]) & (g <= jnp.maximum(view.limit, view.drafted)[:, None]), values, -jnp.inf
        )
        best = jnp.argmax(values, axis=1).astype(jnp.int32)
        gain = jnp.sum(jnp.where(view.active, jnp.max(values, axis=1), 0.0))
        return view.active & (view.drafted < best), gain
