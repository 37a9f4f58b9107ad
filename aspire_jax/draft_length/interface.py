"""What a draft-length policy sees, what it is told, and what it must answer."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from aspire_jax.costs import CostModel
from aspire_jax.shapes import Shapes

State = Any
IDLE, DRAFT, VERIFY = 0, 1, 2
# Most that d_max may be: a verification is a static shape of d_max + 1 tokens a row.
MOST_DRAFTS = 32


class View(NamedTuple):
    """The batch as a policy sees it before a step.

    Attributes:
      active: [B] bool, rows with a request that goes on.
      drafted: [B] drafts held, d; 0 for rows that are not active.
      limit: [B] most drafts a row may hold now: at most d_max, fewer near its end, 0 while nothing of it was measured
        (a new request, or one that comes from a pause).
      lengths: [B] committed tokens.
      selected: [B] float32, tokens a drafting step of the row reads in a layer, by its last selection.
      idle: scalar int32, steps since a row last drafted or held a draft.
      cost: the cost model.
      shapes: the engine's step shapes (static).
    """

    active: jax.Array
    drafted: jax.Array
    limit: jax.Array
    lengths: jax.Array
    selected: jax.Array
    idle: jax.Array
    cost: CostModel
    shapes: Shapes


class Signals(NamedTuple):
    """What is known of the draft that each row made in a step; [B] float32.

    Computed are the fields that the policy names in `signals`. The others are NaN, as is every field of a row that made
    no draft, and `outside` where no layer read the full context while drafting.

    Attributes:
      top_probability: the draft's own probability, by the draft's logits before any sampling parameter.
      margin: how far its logit lay above the second best.
      entropy: of the draft's whole distribution, in nats.
      outside: share of the attention, mean over query heads and the plan's refresh layers, on committed tokens outside
        the selection: what the other layers missed, were they to attend alike.
    """

    top_probability: jax.Array
    margin: jax.Array
    entropy: jax.Array
    outside: jax.Array


class Outcome(NamedTuple):
    """What a step did.

    Attributes:
      verified: [B] bool.
      drafts, accepted, emitted: [B] drafts a verifying row held, those it accepted, tokens it emitted; 0 elsewhere.
        Accepted are more than emitted only under `most_emitted`.
      drafted: [B] bool, rows that made a draft; token: [B] int32, the draft, -1 elsewhere.
      signals: of those drafts.
      seconds: predicted time of this step; plain_seconds: of a step in which every active row decodes plainly.
      active: [B] bool, as in the view.
      recall: [B, d_max] float32, for each draft a verifying row held the share of the attention to committed tokens, by
        the verification's own queries, that lies in the pages the draft read: mean over query heads and layers. None
        unless the policy is `instrumented`.
    """

    verified: jax.Array
    drafts: jax.Array
    accepted: jax.Array
    emitted: jax.Array
    drafted: jax.Array
    token: jax.Array
    signals: Signals
    seconds: jax.Array
    plain_seconds: jax.Array
    active: jax.Array
    recall: jax.Array | None = None


class DraftLengthPolicy(Protocol):
    """The interface: a frozen dataclass with pure functions; its state is a pytree that the engine carries.

    `decide` sees the whole batch, so a policy may let rows go their own ways or keep them in step.

    A policy may have further static attributes:

    signals (tuple[str, ...]): the fields of `Signals` that it reads; without it, none are computed.
    most_emitted (int | None): tokens a verification may emit; its other accepted drafts are dropped.
    instrumented (bool): verifications measure `Outcome.recall`, at the price of all attention once more, and score
      pages by their first and their last emitted token's query, in place of their last query.
    pauses (bool): it may draft nothing for many steps on end; they then run in a program of their own, which is plain
      decoding's and is compiled in addition. There `decide` is asked with the limits that rows would have if all of
      them were measured, also those that no step has measured yet, and any other action than DRAFT is plain decoding.
    """

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


def signals_of(policy: DraftLengthPolicy) -> tuple[str, ...]:
    """The signals that `policy` asks for.

    Raises:
      ValueError: it names one that does not exist.
    """
    asked = tuple(getattr(policy, "signals", ()))
    for name in asked:
        if name not in Signals._fields:
            raise ValueError(f"signals: {name!r}, expected some of {', '.join(Signals._fields)}")
    return asked


def most_emitted_of(policy: DraftLengthPolicy) -> int | None:
    """Tokens a verification may emit under `policy`, None for no such limit."""
    return getattr(policy, "most_emitted", None)


def instrumented(policy: DraftLengthPolicy) -> bool:
    """Whether `policy` asks for the measurements of tracing."""
    return bool(getattr(policy, "instrumented", False))


def pauses(policy: DraftLengthPolicy) -> bool:
    """Whether `policy` asks for a program without drafts."""
    return bool(getattr(policy, "pauses", False))
