"""The interface of context policies.

A policy is a frozen dataclass (hashable: it is part of the static configuration) with a few pure functions; its state
is a pytree that the engine carries. The engine measures attention where the policy's `Plan` says so, hands the page
scores over, and asks for a selection.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol

import jax

import pallas_kernels as pk
from aspire_jax.config import ModelConfig

State = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a policy needs from the forward, all static.

    Attributes:
      verify_layers: layers whose page scores are measured for verifying rows.
      refresh_layers: layers that read the full context while drafting too, and whose page scores are measured then.
      heads: how weights combine over query heads: "max" or "mean" over all, or "kv" (mean over each group, scores
        keep a KV-head axis).
      sets: for each layer, the index of the selection it reads; (0,) * n_layers is one selection for all.
      per_head: a selection for each KV head: selections have an axis of KV heads then.
      same_step: a refresh layer's new selection serves the layers after it within the same draft step.
      renew: what outdates a selection: every step ("step"), or only a verification ("verification"). The next one is
        made before the row drafts again.
      prompt_window: last tokens of a prompt whose attention is measured once, after prefill, for policies that are a
        `PromptObserver`; 0 for none, which costs nothing.
    """

    verify_layers: tuple[int, ...] = ()
    refresh_layers: tuple[int, ...] = ()
    heads: Literal["max", "mean", "kv"] = "max"
    sets: tuple[int, ...] = ()
    per_head: bool = False
    same_step: bool = False
    renew: Literal["step", "verification"] = "verification"
    prompt_window: int = 0

    @property
    def n_sets(self) -> int:
        """Number of different selections."""
        return max(self.sets, default=0) + 1

    @property
    def measured(self) -> tuple[int, ...]:
        """Layers whose page scores any step measures, in order."""
        return tuple(sorted({*self.verify_layers, *self.refresh_layers}))

    def reads_copy(self, layer: int) -> bool:
        """Whether a draft reads the layer's selected pages from the copy made before the step.

        A refresh layer reads everything, and a layer that is served within the step a selection of that step.
        """
        served = self.same_step and layer >= min(self.refresh_layers, default=layer + 1)
        return layer not in self.refresh_layers and not served


class Room(NamedTuple):
    """The room a row has, all static: what turns a policy's budget in tokens into pages, and how they are chosen.

    Attributes:
      pages: pages of a row's page table.
      page_size: tokens a page.
      max_new: most tokens a request may emit.
      d_max: most drafts a row may hold.
      kernels: how the functions of `pallas_kernels` run, for `top_pages` and `best_pages`: their twins in plain XLA
        ("xla"), or the kernels.
    """

    pages: int
    page_size: int
    max_new: int
    d_max: int
    kernels: pk.Implementation = "xla"

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` fill, rounded up; at most a row's."""
        return min(self.pages, -(-tokens // self.page_size))


class Scores(NamedTuple):
    """Page scores of one step: the softmax mass of each page in each measured layer.

    Attributes:
      layers: the measured layers (static), in the order of `mass`.
      mass: [len(layers), B, P], or [len(layers), B, Hkv, P] where the plan's `heads` is "kv". For a verifying row the
        mean of its first and its last query. Zero beyond the committed tokens.
      rows: [len(layers), B] bool, the rows each layer was measured for in this step.
      lengths: [B] committed tokens the mass is spread over: those before this step.
    """

    layers: tuple[int, ...]
    mass: jax.Array
    rows: jax.Array
    lengths: jax.Array


class PromptWeights(NamedTuple):
    """What the last tokens of one prompt attended to.

    Attributes:
      row: [B] bool, the row of the prompt.
      start: scalar, position of the first of those tokens.
      weights: [L, Hkv, S] softmax weights of the S tokens a row has room for, averaged over those last tokens and over
        the query heads of each KV head. Zero from `start` on.
    """

    row: jax.Array
    start: jax.Array
    weights: jax.Array


class ContextPolicy(Protocol):
    """The interface; `lengths` [B] counts committed tokens."""

    def plan(self, config: ModelConfig) -> Plan:
        """What the engine must measure, and how the selection is shared.

        Raises:
          ValueError: the policy does not fit the model.
        """

    def capacity(self, room: Room) -> int:
        """Most pages a row may ever select (static); 0 for a policy that never drafts."""

    def init(self, config: ModelConfig, batch: int, room: Room) -> State:
        """State before anything was measured."""

    def observe(self, state: State, scores: Scores) -> State:
        """Takes in one step's page scores."""

    def select(self, state: State, lengths: jax.Array, room: Room) -> jax.Array:
        """Pages to read: positions in the page table [n_sets, B, capacity] int32, -1 where unused.

        [n_sets, B, Hkv, capacity] where the plan has a selection for each KV head.
        """

    def forget(self, state: State, rows: jax.Array) -> State:
        """Resets the rows [B] bool that a new request takes over."""


class PromptObserver(Protocol):
    """What a policy has in addition where its plan has a `prompt_window`."""

    def observe_prompt(self, state: State, prompt: PromptWeights) -> State:
        """Takes in what the end of a newly admitted prompt attended to; before the row's first step."""
