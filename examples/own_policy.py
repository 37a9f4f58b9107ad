"""A context policy of one's own: drafts read the pages that all verifications so far attended to most.

python examples/own_policy.py [MODEL]
"""

import dataclasses
import sys

import jax.numpy as jnp

import aspire_jax
from aspire_jax.context import Plan, best_pages, pages_of
from aspire_jax.draft_length import FixedDraftLength
from aspire_jax.pure import Method


@dataclasses.dataclass(frozen=True)
class HeavyHitters:
    budget: int = 16  # pages

    def plan(self, config):  # measure the middle layer when verifying; one selection for all layers
        return Plan(verify_layers=(config.n_layers // 2,), heads="mean", sets=(0,) * config.n_layers)

    def capacity(self, room):
        return min(room.pages, self.budget)

    def init(self, config, batch, room):
        return jnp.zeros((batch, room.pages))

    def observe(self, state, scores):
        return state + jnp.where(scores.rows[0][:, None], scores.mass[0], 0)

    def select(self, state, lengths, room):
        capacity = self.capacity(room)
        return best_pages(state, pages_of(lengths, room.page_size), jnp.full_like(lengths, capacity), 4, capacity)[None]

    def forget(self, state, rows):
        return jnp.where(rows[:, None], 0, state)


model = aspire_jax.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
prompt = "One, two, three, four, five, six, seven, eight, nine, ten, " * 12
plain = aspire_jax.generate(model, [prompt], method="autoregressive", max_tokens=32, truncate=True)
drafted = aspire_jax.generate(
    model, [prompt], method=Method(HeavyHitters(), FixedDraftLength(gamma=4)), max_tokens=32, truncate=True
)
assert plain[0].token_ids == drafted[0].token_ids
print(
    f"the same answer, {drafted[0].stats.accepted} of {drafted[0].stats.drafted} drafts accepted: {drafted[0].text!r}"
)
