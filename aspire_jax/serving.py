"""Serving prompts: all their answers at once, or pieces of them as they come.

generate(model, prompts)     all answers, in the order of the prompts
stream(model, prompts)       pieces of answers as they come; its `report` has the figures of the run
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from aspire_jax import costs, methods
from aspire_jax.host import ProgressCallback, Stream
from aspire_jax.loading import Model
from aspire_jax.request import prepare
from aspire_jax.results import Completion
from aspire_jax.sampling.params import SamplingFields
from aspire_jax.sampling.rows import Acceptance
from aspire_jax.tracing import engine_and_hooks

if TYPE_CHECKING:
    from aspire_jax.tracing import Trace


def generate(model: Model, prompts: Iterable[Any], **arguments: Any) -> list[Completion]:
    """Completes `prompts`; the completions come in their order. Arguments and errors as `stream`."""
    return stream(model, prompts, **arguments).collect()


def stream(
    model: Model,
    prompts: Iterable[Any],
    *,
    method: str | methods.Method = "aspire",
    max_tokens: int = 128,
    slots: int = 8,
    options: Mapping[str, Any] | None = None,
    stop: str | Sequence[str] = (),
    truncate: bool = False,
    max_length: int | None = None,
    implementation: str | None = None,
    fit: costs.Fit | None = None,
    trace: Trace | None = None,
    progress: ProgressCallback | None = None,
    reproducible: bool = False,
    acceptance: Acceptance = "coupled",
    **sampling: Unpack[SamplingFields],
) -> Stream:
    """Completes `prompts` and yields pieces of the answers as they come.

    Whatever the method and the number of slots, the tokens are those of plain decoding: the most probable ones at
    temperature 0, the default, and those of the request's seed otherwise (unless `acceptance` is "rejection").

    Args:
      prompts: strings, lists of token ids, lists of messages, or `Request`s.
      method: a name in `methods.METHODS`, or a `Method`.
      max_tokens: tokens of each completion at most, where its request does not say.
      slots: requests decoded at a time; further ones take over the slots of those that finish.
      options: fields of the method's policies by name.
      stop, truncate: for requests that do not say; see `Request`.
      max_length: tokens of a prompt and its completion together, where less than the model's; bounds memory.
      implementation: of attention, "xla" or "pallas" (GPU kernels); None takes the best for the device.
      fit: a cost model's fit to go on with, from an earlier call with the same model.
      trace: what method "oracle" replays, recorded from the same prompts (`tracing.record`).
      progress: called with the report before compiling, after every prefilled chunk and every run of steps.
      reproducible: logits, not only tokens, are equal to the last bit whatever the method, the slots and the other
        prompts; slower. See `aspire_jax.reproducible`.
      acceptance: how drafts of sampled requests are accepted: "coupled" or "rejection", see `aspire_jax.sampling`.
      **sampling: `temperature`, `top_p`, `seed`, ...: sampling fields of requests that do not say; see `Request`.
        Requests without a seed are numbered on from the call's, or from a fresh one; each completion has its own.

    Raises:
      InputError: a prompt that cannot be served; before any work is done.
      ValueError: no such method or option, or an implementation that cannot serve.
    """
    requests = prepare(
        model,
        prompts,
        max_tokens=max_tokens,
        stop=stop,
        truncate=truncate,
        max_length=max_length,
        sampling=dict(sampling),
    )
    engine, hooks = engine_and_hooks(
        model,
        requests,
        method=method,
        slots=slots,
        options=options,
        trace=trace,
        implementation=implementation,
        reproducible=reproducible,
        acceptance=acceptance,
    )
    return Stream(model, requests, engine, fit=fit, progress=progress, hooks=hooks)
