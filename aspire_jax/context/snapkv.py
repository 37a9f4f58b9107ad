"""SnapKV's sparse context: each KV head's own pages of the prompt, chosen once by what the prompt's end attended to."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.config import ModelConfig
from aspire_jax.context.pages import pages_of, top_pages
from aspire_jax.context.policy import Plan, PromptWeights, Room, Scores


@flax.struct.dataclass
class PromptMass:
    """What the end of each prompt attended to.

    Attributes:
      mass: [L, B, Hkv, P] pooled weights of the tokens before the observation window.
      window: [B] position of the window's first token.
    """

    mass: jax.Array
    window: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKVContext:
    """A page set a layer and KV head, fixed after prefill (arXiv 2404.14469; for drafts MagicDec, arXiv 2408.11049).

    The weights of the prompt's last tokens, averaged over them and over a KV head's query heads, are average-pooled
    along the context; the best pages stay, and with them the window and all that was generated since.

    Attributes:
      budget: prompt tokens to read, window included.
      window: last tokens of the prompt, whose attention chooses.
      kernel: tokens that the pooling averages over, an odd number.
    """

    budget: int = 512
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        if self.budget < 2:
            raise ValueError(f"budget: {self.budget}, expected at least 2")
        if not 1 <= self.window < self.budget:
            raise ValueError(f"window: {self.window}, expected 1 to less than budget ({self.budget})")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel: {self.kernel}, expected an odd number")

    def plan(self, config: ModelConfig) -> Plan:
        return Plan(sets=tuple(range(config.n_layers)), per_head=True, prompt_window=self.window)

    def capacity(self, room: Room) -> int:
        kept = room.pages_for(self.window + room.max_new) + 1  # they need not begin with a page
        return min(room.pages, room.pages_for(self.budget - self.window) + kept)

    def init(self, config: ModelConfig, batch: int, room: Room) -> PromptMass:
        mass = jnp.zeros((config.n_layers, batch, config.n_kv_heads, room.pages), jnp.float32)
        return PromptMass(mass, jnp.zeros((batch,), jnp.int32))

    def observe(self, state: PromptMass, scores: Scores) -> PromptMass:
        return state

    def observe_prompt(self, state: PromptMass, prompt: PromptWeights) -> PromptMass:
        """Takes in what the last tokens of a newly admitted prompt attended to."""
        around = self.kernel // 2
        tokens = prompt.weights.shape[-1]
        padded = jnp.pad(prompt.weights, ((0, 0), (0, 0), (around, around)))
        pooled = sum(padded[..., i : i + tokens] for i in range(self.kernel)) / np.float32(self.kernel)
        before = (jnp.arange(tokens, dtype=jnp.int32) < prompt.start)[None, None]  # pooling reaches into the window
        pages = jnp.where(before, pooled, np.float32(0.0))
        pages = pages.reshape(*pages.shape[:2], state.mass.shape[-1], -1).sum(axis=-1)  # [L, Hkv, P]
        return PromptMass(
            jnp.where(prompt.row[None, :, None, None], pages[:, None], state.mass),
            jnp.where(prompt.row, prompt.start, state.window),
        )

    def select(self, state: PromptMass, lengths: jax.Array, room: Room) -> jax.Array:
        index = jnp.arange(room.pages, dtype=jnp.int32)[None]
        inside = index < pages_of(lengths, room.page_size)[:, None]
        kept = inside & (index >= (state.window // room.page_size)[:, None])
        budget = room.pages_for(self.budget - self.window) + jnp.sum(kept, axis=1, dtype=jnp.int32)
        shape = state.mass.shape
        inside, kept = (jnp.broadcast_to(x[None, :, None], shape) for x in (inside, kept))
        wanted = jnp.broadcast_to(budget[None, :, None], shape[:-1])
        return top_pages(state.mass, inside, kept, wanted, self.capacity(room), room.kernels)

    def forget(self, state: PromptMass, rows: jax.Array) -> PromptMass:
        mass = jnp.where(rows[None, :, None, None], np.float32(0.0), state.mass)
        return PromptMass(mass, jnp.where(rows, 0, state.window))
