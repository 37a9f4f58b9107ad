"""This library's part of `bench.peers`: its methods on prompts of one length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from aspire_jax.comparing import Run, in_turns
from aspire_jax.costs import Fit
from aspire_jax.errors import InputError
from aspire_jax.loading import Model
from aspire_jax.methods import METHODS
from aspire_jax.request import Prepared, drop_middle
from aspire_jax.sizing import engine_for
from bench import workloads


class Here:
    """Methods on `batch` prompts of `context` tokens; the prompts of each seed are prefilled once for all methods.

    Attributes:
      methods: their names; the first is AutoRegressive.
      context, batch, lengths: tokens asked for, prompts at a time, and the prompts' real lengths by seed.
      prefill_rate: tokens a second of the last seed's prefill.
    """

    def __init__(
        self,
        model: Model,
        data: Sequence[str],
        methods: Sequence[str],
        *,
        context: int,
        batch: int,
        new: int,
        seeds: int,
    ) -> None:
        unknown = [m for m in methods if m not in METHODS]
        if unknown or methods[0] != "autoregressive":
            raise InputError(
                f"--methods: {' '.join(methods)}, expected autoregressive and others of {', '.join(METHODS)}"
            )
        self.methods, self.context, self.batch = tuple(methods), context, batch
        self._model = model
        self._requests = [_one_length(workloads.near(model, data, batch, context, new, seed)) for seed in range(seeds)]
        self.lengths = [len(requests[0].tokens) for requests in self._requests]
        every = [r for requests in self._requests for r in requests]
        self._engines = {m: engine_for(model, every, method=m, slots=batch) for m in methods}
        self._fit: Fit | None = None
        self.prefill_rate = 0.0

    def prompts(self, seed: int) -> list[np.ndarray]:
        """The seed's prompts."""
        return [r.tokens for r in self._requests[seed]]

    def decode(self, seed: int) -> dict[str, Run]:
        """The seed's answers by method; compiling and each program's first run are not in the times."""
        requests = self._requests[seed]
        short = [dataclasses.replace(r, max_new=4) for r in requests]
        warm, cache, fit = in_turns(self._model, short, self._engines, fit=self._fit)
        first = warm[self.methods[0]][0].report
        self.prefill_rate = first.prefilled / first.prefill_seconds
        runs, _, self._fit = in_turns(self._model, requests, self._engines, cache=cache, fit=fit)
        return {name: run for name, (run,) in runs.items()}


def _one_length(requests: list[Prepared]) -> list[Prepared]:
    """All cut to the shortest, in the middle."""
    length = min(len(r.tokens) for r in requests)
    return [
        dataclasses.replace(r, tokens=np.asarray(drop_middle(r.tokens.tolist(), length), np.int32)) for r in requests
    ]
