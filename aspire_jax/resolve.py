"""The end of a step: what a row keeps of it. Drafting rows keep their token, verifying rows the accepted prefix."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from aspire_jax.engine import LENGTH, RUNNING, STOP, Engine, Slots


class Commit(NamedTuple):
    """What became of the step's tokens.

    Attributes:
      slots: with the step's tokens taken in.
      accepted, emitted: [B] of verifying rows, see `Outcome`.
      tokens, packed: [B, d_max + 1] the tokens of a verifying row, and their packed index.
      place: [B, d_max + 1] where it goes in the output buffer, `max_new` where it is not emitted.
    """

    slots: Slots
    accepted: jax.Array
    emitted: jax.Array
    tokens: jax.Array
    packed: jax.Array
    place: jax.Array


def resolve(
    engine: Engine,
    slots: Slots,
    drafting: jax.Array,
    verified: jax.Array,
    first: jax.Array,
    target: jax.Array,
    margin: jax.Array,
) -> Commit:
    """Takes the step's tokens into the slots.

    Args:
      drafting, verified: [B] bool.
      first: [B] packed index of a row's first token.
      target, margin: [T] the token chosen after each packed token, and by how much.
    """
    rows = jnp.arange(engine.batch, dtype=jnp.int32)
    if engine.d_max:
        at = jnp.where(drafting, slots.drafted, engine.d_max)  # out of range: dropped
        drafts = slots.drafts.at[rows, at].set(target[first], mode="drop")
        slots = dataclasses.replace(slots, drafts=drafts, drafted=slots.drafted + drafting.astype(jnp.int32))
    commit = _commit(engine, slots, verified, first, target, margin)
    steps = slots.steps + (drafting | verified).astype(jnp.int32)
    return commit._replace(slots=dataclasses.replace(commit.slots, steps=steps))


def accept_greedy(drafts: jax.Array, drafted: jax.Array, target: jax.Array) -> jax.Array:
    """Accepted drafts [B]: the longest prefix of each row's drafts [B, d_max] equal to the target's own tokens.

    Args:
      drafted: how many drafts count [B].
      target: [B, d_max + 1] the target's token after the pending token and after each draft.
    """
    place = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    same = (drafts == target[:, :-1]) & (place < drafted[:, None])
    return jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1)


def _commit(
    engine: Engine, s: Slots, verified: jax.Array, first: jax.Array, target: jax.Array, margin: jax.Array
) -> Commit:
    """Verifying rows emit their accepted drafts and the target's next token, up to a stop or their limit."""
    place = jnp.arange(engine.d_max + 1, dtype=jnp.int32)[None]
    index = jnp.minimum(first[:, None] + place, target.shape[0] - 1)
    tokens, margins = target[index], margin[index]  # [B, d_max + 1]
    accepted = accept_greedy(s.drafts, s.drafted, tokens)
    is_stop = jnp.any(tokens[:, :, None] == s.stop[:, None, :], axis=-1)
    left = jnp.minimum(s.max_new - s.emitted, engine.capacity - s.length)  # a slot that is full ends the request too
    room = jnp.minimum(accepted + 1, left)
    before_stop = jnp.min(jnp.where(is_stop, place + 1, engine.d_max + 2), axis=1)  # tokens up to the first stop
    emitted = jnp.where(verified, jnp.minimum(room, before_stop), 0)
    accepted = jnp.where(verified, jnp.minimum(accepted, emitted), 0)
    if engine.most_emitted is not None:
        emitted = jnp.minimum(emitted, engine.most_emitted)
    stopped = verified & (before_stop <= emitted)
    ended = verified & (emitted >= left)
    slot = jnp.where(place < emitted[:, None], s.emitted[:, None] + place, engine.max_new)
    rows = jnp.arange(engine.batch, dtype=jnp.int32)[:, None]
    slots = dataclasses.replace(
        s,
        out=s.out.at[rows, slot].set(tokens, mode="drop"),
        margin=s.margin.at[rows, slot].set(margins, mode="drop"),
        held=s.held.at[rows, slot].set(jnp.where(place == 0, s.drafted[:, None], -1).astype(jnp.int8), mode="drop"),
        emitted=s.emitted + emitted,
        length=s.length + emitted,
        pending=jnp.where(
            verified, jnp.take_along_axis(tokens, jnp.maximum(emitted - 1, 0)[:, None], 1)[:, 0], s.pending
        ),
        drafted=jnp.where(verified, 0, s.drafted),
        drafted_total=s.drafted_total + jnp.where(verified, s.drafted, 0),
        accepted_total=s.accepted_total + jnp.minimum(accepted, emitted),
        verifications=s.verifications + verified.astype(jnp.int32),
        fresh=s.fresh & ~verified,
        active=s.active & ~(stopped | ended),
        reason=jnp.where(stopped, STOP, jnp.where(ended, LENGTH, jnp.where(verified, RUNNING, s.reason))),
    )
    return Commit(slots, accepted, emitted, tokens, index, slot)
