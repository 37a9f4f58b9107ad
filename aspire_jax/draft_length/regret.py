"""The guard that keeps speculation from losing: how far may it fall behind plain decoding before it stops?"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.draft_length.interface import Outcome, View

MOST = 1e6  # bound of the options, a number of steps


@flax.struct.dataclass
class Ledger:
    """Scalars, by the cost model: seconds all steps took, and seconds plain decoding would have taken for as much.

    Attributes:
      spent: of all steps.
      earned: of the plain steps that would have emitted the same tokens.
    """

    spent: jax.Array
    earned: jax.Array


def empty() -> Ledger:
    """Nothing spent, nothing earned."""
    zero = jnp.zeros((), jnp.float32)
    return Ledger(zero, zero)


def entered(ledger: Ledger, outcome: Outcome, keep: float = 1.0) -> Ledger:
    """The ledger after a step; `keep` is the share of the old entries that still counts."""
    rows = jnp.maximum(jnp.sum(outcome.active), 1).astype(jnp.float32)
    plain_steps = jnp.sum(outcome.emitted).astype(jnp.float32) / rows
    return Ledger(
        spent=np.float32(keep) * ledger.spent + outcome.seconds,
        earned=np.float32(keep) * ledger.earned + plain_steps * outcome.plain_seconds,
    )


def plain_seconds(view: View) -> jax.Array:
    """Time of a step in which every active row decodes plainly; scalar."""
    ones = view.active.astype(jnp.int32)
    return view.cost.seconds(view.shapes.forecast(jnp.zeros_like(view.active), ones, view.lengths, view.selected))


def may_try(ledger: Ledger, view: View, hoped: jax.Array, share: float, steps: float) -> jax.Array:
    """Whether speculation has lost little enough so far to be tried again; scalar bool.

    Args:
      hoped: tokens that the drafts now held are expected to add, over all rows; scalar.
      share: of the time earned, that may be lost; steps: plain steps that may be lost on top.
    """
    plain = plain_seconds(view)
    rows = jnp.maximum(jnp.sum(view.active), 1).astype(jnp.float32)
    lost = ledger.spent - ledger.earned - hoped / rows * plain
    return lost <= np.float32(share) * ledger.earned + np.float32(steps) * plain
