"""Draws the tokens of a step, for drafts and for the target, under both kinds of acceptance."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aspire_jax.sampling import noise
from aspire_jax.sampling.process import processed
from aspire_jax.sampling.rows import Sampling, Support
from aspire_jax.sampling.truncate import Kept, truncated


class Packed(NamedTuple):
    """A step's packed tokens, as far as drawing needs them; at least B.

    Attributes:
      logits: [T, V] raw logits after each token, float32.
      row: [T] its slot.
      place: [T] drafts before the token that is drawn.
      valid: [T] bool, false for padding.
    """

    logits: jax.Array
    row: jax.Array
    place: jax.Array
    valid: jax.Array


class Rows(NamedTuple):
    """The slots, as far as drawing needs them.

    Attributes:
      drafting: [B] bool, rows whose token is a draft.
      drafts: [B, d_max]; drafted: [B] how many of them count.
      length: [B] committed tokens; emitted: [B].
      stop: [B, max_stop] stop tokens, -1 where unused.
    """

    drafting: jax.Array
    drafts: jax.Array
    drafted: jax.Array
    length: jax.Array
    emitted: jax.Array
    stop: jax.Array


class Drawn(NamedTuple):
    """What became of each packed token.

    Attributes:
      token, margin: [T] the token drawn after it, and the least change of logits that would exchange it.
      logprob: [T] the token's log-probability; best_token, best_logprob: [T, n] the n most probable ones.
    """

    token: jax.Array
    margin: jax.Array
    logprob: jax.Array
    best_token: jax.Array
    best_logprob: jax.Array


def draw(
    support: Support,
    sampling: Sampling,
    packed: Packed,
    rows: Rows,
    chunks: jax.Array,
    token: jax.Array,
    margin: jax.Array,
) -> tuple[Sampling, Drawn]:
    """Draws a token after every packed token.

    Where no row wants more than greedy decoding nothing is done, and `token` and `margin` are the result.

    Args:
      chunks: scalar int32, how many times B packed tokens the step has, rounded up.
      token, margin: [T] the greedy ones, of raw logits.

    Returns:
      `sampling` with the proposals of the rows that draft, and what was drawn.
    """
    t, n, batch = token.shape[0], support.logprobs or 0, rows.drafting.shape[0]
    none = jnp.zeros((t,), jnp.float32)
    begin = Drawn(token, margin, none, jnp.zeros((t, n), jnp.int32), jnp.zeros((t, n), jnp.float32))
    settings = sampling.settings
    wants = (settings.temperature > 0) | settings.penalised | settings.logprobs | (rows.emitted < settings.min_tokens)
    if support.bias:
        wants = wants | jnp.any(settings.bias != 0, axis=-1)
    acting = jnp.any(wants[packed.row] & packed.valid)

    # B tokens at a time: what is compiled, and what it holds at a time, does not grow with the step's width. Where T is
    # not whole chunks the last one overlaps the one before, and draws the same once more.
    def chunk(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[Any, ...]:
        proposals, drafted_from, drawn = carry
        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * batch, batch), packed)
        now = dataclasses.replace(sampling, proposals=proposals)
        p, new = _draw(support, now, part, rows)
        if rejects:
            at = jnp.where(rows.drafting[part.row] & part.valid, part.row, batch)  # out of range: dropped
            drafted_from = drafted_from.at[at].set(p, mode="drop")
        put = lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, i * batch, 0)  # noqa: E731
        # The barrier keeps the proposals in the carry: what a loop reads and something behind it writes is copied.
        return jax.lax.optimization_barrier(proposals), drafted_from, jax.tree.map(put, drawn, new)

    rejects = sampling.proposals.shape[1] > 0
    drafted_from = jnp.zeros((batch, sampling.proposals.shape[2]), jnp.float32)
    carry = (sampling.proposals, drafted_from, begin)
    proposals, drafted_from, drawn = jax.lax.fori_loop(0, jnp.where(acting, chunks, 0), chunk, carry)
    if rejects:
        slot = jnp.where(rows.drafting, rows.drafted, proposals.shape[1])
        proposals = proposals.at[jnp.arange(batch, dtype=jnp.int32), slot].set(drafted_from, mode="drop")
    return dataclasses.replace(sampling, proposals=proposals), drawn


def _draw(support: Support, sampling: Sampling, packed: Packed, rows: Rows) -> tuple[jax.Array, Drawn]:
    """As `draw`, for B packed tokens; returns the distributions they were drawn from where drafts may be rejected."""
    settings, row, place = sampling.settings, packed.row, packed.place
    drafting = rows.drafting[row]
    drafts = rows.drafts[row]
    logits = processed(support, settings, packed.logits, row, drafts, place, rows.emitted[row], rows.stop[row])
    sampled = settings.temperature[row] > 0
    temperature = jnp.where(sampled, settings.temperature[row], 1)
    scaled = logits / temperature[:, None]
    kept = truncated(settings, scaled, row)
    keys = at_position = noise.keys_at(settings.key[row], rows.length[row] + place + 1)
    rejects = sampling.proposals.shape[1] > 0
    if rejects:
        own = jax.random.key_data(noise.purpose(keys, noise.DRAFT))
        keys = jnp.where(drafting[:, None], own, jax.random.key_data(keys))
        keys = jax.random.wrap_key_data(keys, impl="threefry2x32")
    # Where no row of them samples, a step of greedy rows with penalties does not pay for noise.
    shape = logits.shape
    some = jnp.any(sampled & packed.valid)
    perturbation = jax.lax.cond(
        some, lambda k: noise.gumbel(k, shape[1]), lambda _: jnp.zeros(shape, jnp.float32), keys
    )
    perturbation = jnp.where(sampled[:, None], perturbation, 0)
    token = jnp.argmax(kept.logits + perturbation, axis=-1).astype(jnp.int32)
    margin = temperature * _margin(scaled, perturbation, kept, token)
    p = kept.logits
    if rejects:
        p = jax.nn.softmax(kept.logits, axis=-1)
        verifies = sampled & ~drafting
        held = verifies & (place < rows.drafted[row])
        slot = jnp.minimum(place, drafts.shape[1] - 1)
        q = jnp.where(held[:, None], sampling.proposals[row, slot], 0)
        draft = jnp.where(held, jnp.take_along_axis(drafts, slot[:, None], 1)[:, 0], -1)
        accept = noise.uniform(noise.purpose(at_position, noise.ACCEPT))
        token = jnp.where(verifies, accept_or_resample(p, q, draft, accept, perturbation), token)
    if support.acceptance == "rejection":
        margin = jnp.where(sampled, jnp.inf, margin)
    drawn = Drawn(token, margin, *_logprobs(support, settings.logprobs[row] & ~drafting, packed.logits, token))
    return p, drawn


def accept_or_resample(
    p: jax.Array, q: jax.Array, draft: jax.Array, uniform: jax.Array, gumbel: jax.Array
) -> jax.Array:
    """The token after each verified one [T] by rejection: the draft, or a draw from the positive part of p - q.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2.

    Args:
      p, q: [T, V] the target's probabilities, and those the draft was drawn from (0 where there is no draft).
      draft: [T], -1 where there is none.
      uniform: [T] in [0, 1).
      gumbel: [T, V] standard Gumbel noise.
    """
    at = jnp.maximum(draft, 0)[:, None]
    p_draft, q_draft = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (p, q))
    accepted = (draft >= 0) & (uniform * q_draft < p_draft)
    rest = jnp.maximum(p - q, 0)
    # Nothing is left where p = q up to rounding; then a rejection has a probability of about rounding, too.
    rest = jnp.where(jnp.any(rest > 0, axis=-1, keepdims=True), rest, p)
    other = jnp.argmax(jnp.log(rest) + gumbel, axis=-1).astype(jnp.int32)
    return jnp.where(accepted, draft, other)


def _margin(logits: jax.Array, perturbation: jax.Array, kept: Kept, token: jax.Array) -> jax.Array:
    """By how much differences of `logits` [T, V] must change at least for another token than `token` [T] to win."""

    def at_token(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, token[:, None], axis=1)

    possible = logits > -jnp.inf
    to_enter = jnp.minimum(kept.share[:, None], kept.reach[:, None] - logits)
    to_enter = jnp.maximum(jnp.maximum(kept.outer[:, None] - logits, to_enter), 0)
    to_win = jnp.maximum(to_enter, at_token(logits + perturbation) - (logits + perturbation))
    is_token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == token[:, None]
    to_win = jnp.min(jnp.where(possible & ~is_token, to_win, jnp.inf), axis=-1)
    return jnp.minimum(to_win, jnp.minimum(at_token(logits)[:, 0] - kept.inner, kept.slack))


def _logprobs(
    support: Support, wanted: jax.Array, logits: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability of `token` [T], and the n most probable tokens with theirs [T, n]; of raw logits [T, V]."""
    t, n = token.shape[0], support.logprobs or 0
    nothing = (jnp.zeros((t,), jnp.float32), jnp.zeros((t, n), jnp.int32), jnp.zeros((t, n), jnp.float32))
    if support.logprobs is None:
        return nothing

    def measure(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        total = jax.nn.logsumexp(logits, axis=-1)
        own = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - total
        best, index = jax.lax.top_k(logits, n)
        return own, index.astype(jnp.int32), best - total[:, None]

    return jax.lax.cond(jnp.any(wanted), measure, lambda _: nothing, logits)


def record(
    sampling: Sampling, drawn: Drawn, packed: jax.Array, place: jax.Array, tokens: jax.Array, emitted: jax.Array
) -> Sampling:
    """Takes in what was emitted: counts for the penalties, log-probabilities.

    Args:
      packed: [B, d_max + 1] packed index of each token of a verifying row.
      place: [B, d_max + 1] where it goes in the output buffer; out of range where it is not emitted.
      tokens: [B, d_max + 1] the tokens.
      emitted: [B] how many of them were emitted.
    """
    rows = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None]
    settings = sampling.settings
    if settings.seen.shape[1]:
        goes = jnp.arange(place.shape[1], dtype=jnp.int32)[None] < emitted[:, None]
        seen = settings.seen.at[rows, tokens].add(2 * goes.astype(jnp.int32))
        sampling = dataclasses.replace(sampling, settings=dataclasses.replace(settings, seen=seen))
    if not sampling.logprob.shape[1]:
        return sampling
    return dataclasses.replace(
        sampling,
        logprob=sampling.logprob.at[rows, place].set(drawn.logprob[packed], mode="drop"),
        best_token=sampling.best_token.at[rows, place].set(drawn.best_token[packed], mode="drop"),
        best_logprob=sampling.best_logprob.at[rows, place].set(drawn.best_logprob[packed], mode="drop"),
    )
