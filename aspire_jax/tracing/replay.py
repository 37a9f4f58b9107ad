"""The oracle's second pass: a trace's accepted lengths as the plan of an engine that drafts nothing else.

The context policy must be the trace's, for the drafts to be the same; so must the sequence of verifications, which is
why only cadence "accepted" can be replayed. Rounding may then still tip a near tie, of a token or of two pages' scores,
because verifications of fewer drafts are other products. What happens there: a draft is rejected after all, and the run
goes on from its own position, without a plan until it meets one of the trace's positions again. What is emitted is the
target's own token in any case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from aspire_jax.draft_length import OracleDraftLength, OracleState
from aspire_jax.engine import Engine
from aspire_jax.errors import InputError
from aspire_jax.loading import Model
from aspire_jax.methods import METHODS, Method
from aspire_jax.request import Prepared
from aspire_jax.results import Completion
from aspire_jax.sizing import engine_for
from aspire_jax.tracing.file import Trace
from aspire_jax.tracing.record import options_of


def engine_and_hooks(
    model: Model,
    requests: Sequence[Prepared],
    *,
    method: str | Method,
    slots: int,
    options: Mapping[str, Any] | None,
    trace: Trace | None,
    **engine: Any,
) -> tuple[Engine, Replay | None]:
    """The engine that serves `requests`, and what a stream needs beside it where it replays `trace`.

    Args: as `sizing.engine_for`, and `trace`.

    Raises:
      InputError: a trace is missing, one too many, or not one of these requests.
      ValueError: as `sizing.engine_for`.
    """
    if trace is not None and method == "oracle":
        method, options = _by_trace(trace, options)
    made = engine_for(model, requests, method=method, slots=slots, options=options, **engine)
    if trace is not None:
        return made, Replay(trace, made, requests)
    if isinstance(made.draft_length, OracleDraftLength):
        raise InputError("trace: missing, expected one of these prompts: method oracle replays it")
    return made, None


def _by_trace(trace: Trace, options: Mapping[str, Any] | None) -> tuple[Method, dict[str, Any]]:
    """The oracle by a trace's context policy, and the options left to give to `methods.configure`."""
    name = trace.meta["method"]
    if name not in METHODS or type(METHODS[name].context).__name__ != trace.meta["context"]:
        raise InputError(f"trace: method {name!r} with {trace.meta['context']}, expected a method of the table")
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in trace.meta["options"].items()}
    left = dict(options or {})
    for key in [k for k in left if k in fields]:
        if left[key] != fields[key]:
            raise InputError(f"{key}: {left[key]!r}, expected the trace's {fields[key]!r}")
        del left[key]
    left.setdefault("page_size", trace.meta["page_size"])
    try:
        context: Any = dataclasses.replace(METHODS[name].context, **fields)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise InputError(f"trace: {error}, expected options of {trace.meta['context']}") from error
    return Method(context, OracleDraftLength(d_max=trace.d_max), METHODS["oracle"].mixed), left


class Replay:
    """Gives each row its request's plan (`hooks.Hooks`)."""

    def __init__(self, trace: Trace, engine: Engine, requests: Sequence[Prepared]) -> None:
        """Raises InputError where the trace is not one of these requests under this engine's context policy."""
        if not isinstance(engine.draft_length, OracleDraftLength):
            raise InputError("trace: given, expected only with method oracle")
        if trace.meta["cadence"] != "accepted":
            raise InputError(f"trace: cadence {trace.meta['cadence']!r}, expected 'accepted'")
        have = {"context": type(engine.context).__name__, "page_size": engine.page_size, "options": options_of(engine)}
        for name, value in have.items():
            if trace.meta[name] != value:
                raise InputError(f"trace: {name} {trace.meta[name]!r}, expected {value!r}")
        places: dict[tuple[str, int], list[int]] = {}
        for i, (name, tokens) in enumerate(zip(trace.ids, trace.prompt_tokens, strict=True)):
            places.setdefault((str(name), int(tokens)), []).append(i)
        self._rows: dict[tuple[int, int], int] = {}
        for r in requests:
            found = places.get((str(r.id), len(r.tokens)), [])
            if r.choice >= len(found):
                raise InputError(f"trace: no request {r.id!r} of {len(r.tokens)} tokens, expected every one of the run")
            self._rows[r.index, r.choice] = found[r.choice]
        self._trace = trace

    def admitted(self, state: OracleState, slot: int, request: Prepared) -> OracleState:
        """The state with the request's plan in its row."""
        plan = np.array(state.plan)
        plan[slot] = self._trace.plan(self._rows[request.index, request.choice], plan.shape[1])
        return dataclasses.replace(state, plan=jnp.asarray(plan))

    def finished(self, state: OracleState, slot: int, request: Prepared, completion: Completion) -> None:
        """Nothing is left to do."""
