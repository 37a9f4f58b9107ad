"""Recording a trace: an ordinary run whose draft-length policy drafts to `d_max` and keeps what it is told."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from aspire_jax.cache import KVCache
from aspire_jax.draft_length import Record, RecordDraftLength
from aspire_jax.engine import Engine
from aspire_jax.errors import InputError
from aspire_jax.host import ProgressCallback, Stream
from aspire_jax.loading import Model
from aspire_jax.methods import Method
from aspire_jax.request import Prepared, prepare
from aspire_jax.results import Completion
from aspire_jax.sizing import engine_for
from aspire_jax.tracing.file import FORMAT, MEASURED, Trace

Cadence = Literal["accepted", "every"]


def record(
    model: Model,
    prompts: Iterable[Any],
    *,
    method: str | Method = "aspire",
    cadence: Cadence = "accepted",
    d_max: int = 16,
    max_tokens: int = 128,
    slots: int = 8,
    options: Mapping[str, Any] | None = None,
    stop: str | Sequence[str] = (),
    truncate: bool = False,
    max_length: int | None = None,
    progress: ProgressCallback | None = None,
) -> Trace:
    """Answers `prompts` and records what became of every draft.

    Args:
      prompts, max_tokens, slots, stop, truncate, max_length, progress: as for `aspire_jax.stream`.
      method: whose context policy the drafts read by; its draft lengths play no part.
      cadence: "accepted" goes on behind the accepted drafts, as a run does, and is what the oracle replays; "every"
        drafts behind every token of the answer, for simulations. A schedule decides what is measured when: under
        "every" each draft's first selection comes from the token just emitted.
      d_max: drafts before each verification.
      options: fields of the method's policies by name.

    Raises:
      InputError: a prompt that cannot be served.
      ValueError: no such method or option, or a method that never drafts.
    """
    requests = prepare(model, prompts, max_tokens=max_tokens, stop=stop, truncate=truncate, max_length=max_length)
    return record_prepared(
        model, requests, method=method, cadence=cadence, d_max=d_max, slots=slots, options=options, progress=progress
    )


def record_prepared(
    model: Model,
    requests: Sequence[Prepared],
    *,
    method: str | Method = "aspire",
    cadence: Cadence = "accepted",
    d_max: int = 16,
    slots: int = 8,
    options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> Trace:
    """As `record`, of requests that `request.prepare` made."""
    engine = recorder(engine_for(model, requests, method=method, slots=slots, options=options), d_max, cadence)
    recording = Recording(model, engine, requests, method if isinstance(method, str) else type(method).__name__)
    Stream(model, requests, engine, progress=progress, hooks=recording).collect()
    return recording.trace()


def record_pass(
    model: Model, requests: Sequence[Prepared], engine: Engine, method: str, cache: KVCache | None
) -> tuple[Trace, KVCache | None]:
    """The oracle's first pass for `engine`, which is the second: the trace, and the cache as it was handed over.

    Args:
      requests, cache: as for `host.Stream`.
      method: whose engine it is.
    """
    first = recorder(engine, engine.d_max, "accepted")
    recording = Recording(model, first, requests, method)
    stream = Stream(model, requests, first, cache=cache, keep_cache=True, hooks=recording)
    stream.collect()
    return recording.trace(), stream.cache


def recorder(engine: Engine, d_max: int, cadence: Cadence) -> Engine:
    """The engine that records by the context policy of `engine`; attention is plain XLA's, which can be measured.

    Raises:
      ValueError: that policy never selects anything.
    """
    if not engine.selected:
        raise ValueError(f"method: {type(engine.context).__name__} selects no context, expected one that can draft")
    policy = RecordDraftLength(d_max=d_max, cadence=cadence, positions=engine.max_new)
    return dataclasses.replace(engine, draft_length=policy, mixed=False, implementation="xla")


class Recording:
    """Collects the rows' records as requests finish (`hooks.Hooks`)."""

    def __init__(self, model: Model, engine: Engine, requests: Sequence[Prepared], method: str) -> None:
        """Args: what the stream is given; `method`: the name under which the trace says whose context policy it was."""
        self._model, self._engine, self._method = model, engine, method
        self._place = {(r.index, r.choice): i for i, r in enumerate(requests)}
        self._requests = requests
        self._parts: dict[int, tuple[list[int], dict[str, np.ndarray]]] = {}

    def admitted(self, state: Record, slot: int, request: Prepared) -> Record:
        """Changes nothing."""
        return state

    def finished(self, state: Record, slot: int, request: Prepared, completion: Completion) -> None:
        """Takes the row's record over."""
        row = jax.tree.map(lambda x: np.array(x[slot]), state)
        # A stop string is found only after the run in which it came; what began behind it is no part of the answer.
        (start,) = np.nonzero((row.drafted > 0) & (np.arange(len(row.drafted)) < len(completion.token_ids)))
        part = {"position": start, "drafted": row.drafted[start], "accepted": row.accepted[start]}
        part |= {"draft": row.token[start], "recall": row.recall[start]}
        part |= {name: x[start] for name, x in row.signals._asdict().items()}
        made = np.arange(row.token.shape[1]) < row.drafted[start][:, None]
        part["draft"] = np.where(made, part["draft"], -1)
        part |= {name: np.where(made, part[name], np.nan) for name in MEASURED}
        self._parts[self._place[request.index, request.choice]] = (list(completion.token_ids), part)

    def trace(self) -> Trace:
        """The trace of all requests.

        Raises:
          InputError: a request has not finished.
        """
        if len(self._parts) < len(self._requests):
            raise InputError(f"trace: {len(self._parts)} of {len(self._requests)} requests finished, expected all")
        answers = [self._parts[i][0] for i in range(len(self._requests))]
        parts = [self._parts[i][1] for i in range(len(self._requests))]
        tokens = np.full((len(answers), max(map(len, answers))), -1, np.int32)
        for row, answer in zip(tokens, answers, strict=True):
            row[: len(answer)] = answer

        def joined(name: str) -> np.ndarray:
            kind = np.float32 if name in MEASURED else np.int32
            return np.concatenate([part[name] for part in parts]).astype(kind)

        prompt = np.array([len(r.tokens) for r in self._requests], np.int32)
        request = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part["position"]) for part in parts])
        names = ("position", "drafted", "accepted", "draft", *MEASURED)
        arrays = {name: joined(name) for name in names}
        return Trace(
            meta=self._meta(),
            ids=np.array([str(r.id) for r in self._requests]),
            prompt_tokens=prompt,
            emitted=np.array([len(answer) for answer in answers], np.int32),
            tokens=tokens,
            request=request,
            length=prompt[request] - 1 + arrays["position"],
            **arrays,
        )

    def _meta(self) -> dict[str, Any]:
        policy = self._engine.draft_length
        assert isinstance(policy, RecordDraftLength)
        return {
            "format": FORMAT,
            "model": self._model.name,
            "dtype": self._model.dtype,
            "method": self._method,
            "context": type(self._engine.context).__name__,
            "options": options_of(self._engine),
            "d_max": policy.d_max,
            "page_size": self._engine.page_size,
            "cadence": policy.cadence,
            "versions": {name: _version(name) for name in ("aspire-jax", "jax", "numpy")},
        }


def options_of(engine: Engine) -> dict[str, Any]:
    """The fields of the engine's context policy as JSON has them."""
    context: Any = engine.context
    fields = {f.name: getattr(context, f.name) for f in dataclasses.fields(context)}
    return json.loads(json.dumps(fields, default=str))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"
