"""What `forward` asks of an implementation of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from aspire_jax.attention.softmax import Partial

if TYPE_CHECKING:
    from aspire_jax.engine import Engine, State
    from aspire_jax.forward import Batch
    from aspire_jax.shapes import Shape


def ends(batch: Batch, shape: Shape) -> jax.Array:
    """Packed index [B, E] of each row's first and last query token; of the only one where a row may bring no more."""
    if shape.queries == 1:
        return batch.first[:, None]
    return jnp.stack([batch.first, batch.first + jnp.maximum(batch.queries - 1, 0)], axis=1)


class Attention(Protocol):
    """Attention of one step, layer by layer; what is the same for all layers is computed once, when it is made."""

    def __init__(self, engine: Engine, state: State, batch: Batch, shape: Shape) -> None: ...

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: int | jax.Array,
        set_index: Any,
        refresh: bool,
        served: Any,
    ) -> Partial:
        """All packed tokens' attention in one layer, unnormalised.

        Args:
          q: [T, Hkv, G, D]; k, v: [T, Hkv, D] of the packed tokens, which the cache does not hold yet.
          set_index: which selection the layer's drafting rows read.
          refresh: whether they read the full context in this layer.
          served: selections made in this step, in place of the state's; None where there are none.

        Returns:
          Partial over [T, Hkv, G].
        """

    def measure(
        self, q: jax.Array, part: Partial, layer: int | jax.Array, selection: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Every acting row's attention to its committed tokens, by its first and its last query token.

        Called right behind the layer's `attend`, whose q and result it takes.

        Args:
          selection: see `signals.outside_of`; None where nobody asks.

        Returns:
          Page scores (see `Scores.mass`, one layer's; of an instrumented verification those of all queries apart, on an
          axis behind B), and the attention outside the selection [B].
        """

    def recall(self, q: jax.Array, part: Partial, layer: int | jax.Array, set_index: Any) -> jax.Array | None:
        """One layer's recall [B, d_max] of the drafts' selections; None unless this is an instrumented verification."""
        return None
