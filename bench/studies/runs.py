"""What the studies are made from: one model, its prompts prefilled once, and traces of what every draft is worth.

Everything is made when first asked for and kept, so a study alone pays for nothing that it does not use, and studies
that vary something around the same point share that point's run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aspire_jax import load, tracing
from aspire_jax.context import ContextPolicy, RefreshContext
from aspire_jax.loading import Model
from aspire_jax.request import Prepared
from aspire_jax.tracing import Trace
from bench import command, workloads
from bench.context_family import Group, summary
from bench.simulation import recorded
from bench.simulation.acceptance import Acceptance
from bench.studies.study import Result

# Tokens of a page wherever page size is not what is studied; the paper's.
PAGE = 16
# A share of the pages read is kept for the last ones: a quarter, as in the paper (8 of 32).
_RECENT = 4


class Sizes(NamedTuple):
    """How much is measured.

    Attributes:
      prompts: decoded beside each other; context: tokens of a prompt, about; max_tokens: tokens decoded behind each.
      requests: of a trace; positions: places of each answer that it drafts from; d_max: drafts from each.
      budget: tokens a draft reads.
      steps: of each replayed run.
      seed: chooses the prompts.
      quick: whether studies leave out values.
    """

    prompts: int = 4
    context: int = 2000
    max_tokens: int = 64
    requests: int = 8
    positions: int = 64
    d_max: int = 20
    budget: int = 256
    steps: int = 4000
    seed: int = 0
    quick: bool = False


class Runs:
    """Runs of one model, and traces, recorded ones where they are given."""

    def __init__(
        self, model: str, data: Sequence[str], traces: Sequence[Trace], sizes: Sizes, say: command.Say
    ) -> None:
        self._name, self._data, self.sizes, self.say = model, list(data), sizes, say
        self._given = list(traces)
        self._seen: dict[tuple[ContextPolicy, int, int], Result] = {}

    @functools.cached_property
    def model(self) -> Model:
        """The model."""
        self.say(f"loading {self._name}")
        return load(self._name)

    def context(self, size: int = PAGE, **fields: Any) -> RefreshContext:
        """ASPIRE's context policy with the studies' budget, in pages of `size` tokens."""
        pages = max(self.sizes.budget // size, 1)
        known = {"rho": 0.0, "k_min": pages, "recent": max(pages // _RECENT, 1), "renew": "step"}
        return RefreshContext(**{**known, **fields})

    @functools.cached_property
    def traces(self) -> list[Trace]:
        """Given ones, or one recorded by ASPIRE's policy, which drafts from every position of each answer."""
        if self._given:
            return self._given
        s, context = self.sizes, self.context()
        self.say(
            f"recording {s.requests} prompts of {s.context} tokens, {s.d_max} drafts from {s.positions} places each"
        )
        options = {"rho": 0.0, "k_min": context.k_min, "recent": context.recent, "renew": "step"}
        return [
            tracing.record_prepared(
                self.model,
                self._prompts(s.requests, s.positions + s.d_max + 1),
                options=options,
                cadence="every",
                d_max=s.d_max,
                slots=s.requests,
            )
        ]

    def acceptances(self, d_max: int) -> Acceptance:
        """The traces as the replay takes them, with drafts beyond `d_max` left out."""
        known = recorded.acceptance(self.traces)
        return known._replace(run=np.minimum(known.run, d_max), margin=known.margin[:, :, :d_max])

    @functools.cached_property
    def requests(self) -> list[Prepared]:
        """The prompts of what is decoded."""
        return self._prompts(self.sizes.prompts, self.sizes.max_tokens)

    @functools.cached_property
    def group(self) -> Group:
        """The prompts, prefilled."""
        s = self.sizes
        self.say(f"prefilling {s.prompts} prompts of {s.context} tokens")
        return Group(self.model, self.requests, -(-(s.context + s.max_tokens) // 64) * 64)

    def accepted(self, context: ContextPolicy, drafts: int, size: int = PAGE) -> Result:
        """Acceptance of a policy that drafts so many tokens before every verification: accepted by drafted.

        `all`, and of the verifications that met new text `novel` (see `bench.novelty`); each with `rate`, the
        `standard_error` over prompts, and the number of `verifications`.
        """
        key = (context, drafts, size)
        if key not in self._seen:
            found = summary(self.group.decode(context, drafts, size))
            self._seen[key] = {
                kind: {
                    "rate": found[kind]["mean"] / drafts,
                    "standard_error": found[kind]["standard_error"] / drafts,
                    "verifications": found[kind]["verifications"],
                }
                for kind in ("all", "novel")
            }
        return self._seen[key]

    def described(self) -> Result:
        """What was run, as far as it was."""
        out: Result = {"sizes": self.sizes._asdict()}
        if "model" in self.__dict__:
            out |= {"model": self.model.name, "dtype": self.model.dtype}
        if "group" in self.__dict__:
            out["answers_that_differ"] = self.group.differing
        if "traces" in self.__dict__:
            out["traces"] = [{**t.meta, **t.summary()} for t in self.traces]
            out.setdefault("model", self.traces[0].meta["model"])
        return out

    def _prompts(self, count: int, tokens: int) -> list[Prepared]:
        return workloads.near(self.model, self._data, count, self.sizes.context, tokens, self.sizes.seed)
