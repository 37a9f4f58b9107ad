"""Steps 1 to 3 of the contract: what a request adds to, takes from and rules out of a token's raw logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from aspire_jax.sampling.rows import Settings, Support


def processed(
    support: Support,
    settings: Settings,
    logits: jax.Array,
    row: jax.Array,
    drafts: jax.Array,
    place: jax.Array,
    emitted: jax.Array,
    stop: jax.Array,
) -> jax.Array:
    """Logits [T, V] after bias, penalties and ruled out stop tokens.

    Args:
      settings: of all slots.
      logits: [T, V] raw, float32.
      row: [T] each token's slot.
      drafts: [T, d_max] the slot's drafts, of which the first `place` [T] are taken as emitted.
      emitted: [T] tokens the slot has emitted, without drafts.
      stop: [T, max_stop] stop tokens, -1 where unused.
    """
    if support.bias:
        logits = logits + settings.bias[row]
    if support.penalties:
        penalised = settings.penalised[row]
        logits = jax.lax.cond(
            jnp.any(penalised), lambda x: _penalise(settings, x, row, drafts, place), lambda x: x, logits
        )
    blocked = (emitted + place < settings.min_tokens[row])[:, None] & (stop >= 0)
    token = jnp.where(blocked, stop, logits.shape[1])  # out of range: dropped
    index = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[index, token].set(-jnp.inf, mode="drop")


def _penalise(settings: Settings, logits: jax.Array, row: jax.Array, drafts: jax.Array, place: jax.Array) -> jax.Array:
    """Repetition, frequency and presence penalties."""
    index = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    drafted = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < place[:, None]
    seen = settings.seen[row].at[index, drafts].add(2 * drafted.astype(jnp.int32))  # [T, V]
    times = (seen >> 1).astype(jnp.float32)

    def of(values: jax.Array) -> jax.Array:
        return values[row][:, None]

    repetition = of(settings.repetition)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    return logits - of(settings.frequency) * times - jnp.where(times > 0, of(settings.presence), 0)
