"""The table of methods: a method is a context policy x a draft-length policy x whether rows mix.

Everything else, the model, the forward, the loop, is the same for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from aspire_jax.attention.choose import choose
from aspire_jax.config import ModelConfig
from aspire_jax.context import (
    BlendContext,
    ContextPolicy,
    NoContext,
    RefreshContext,
    SnapKVContext,
    StreamingContext,
    VegasContext,
)
from aspire_jax.draft_length import (
    AdaptiveDraftLength,
    AspireDraftLength,
    DraftLengthPolicy,
    FixedDraftLength,
    FsmDraftLength,
    NoDraft,
    OracleDraftLength,
)
from aspire_jax.engine import Engine
from aspire_jax.reproducible import block_of


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
      context: which pages a draft may read.
      draft_length: when a row verifies.
      mixed: whether rows may draft and verify in one step. None: as the implementation gains by it. That of plain XLA
        does not (a mixed step pays for the widest of everything), so rows keep in step; with the kernels they mix.
    """

    context: ContextPolicy
    draft_length: DraftLengthPolicy
    mixed: bool | None = False


METHODS: dict[str, Method] = {
    "autoregressive": Method(NoContext(), NoDraft()),
    "magicdec-streaming": Method(StreamingContext(), FixedDraftLength()),
    "magicdec-snapkv": Method(SnapKVContext(), FixedDraftLength()),
    "vegas": Method(VegasContext(), FixedDraftLength()),
    "aspire-fixed": Method(RefreshContext(), FixedDraftLength()),
    "aspire-fsm": Method(RefreshContext(), FsmDraftLength(), mixed=True),
    "aspire": Method(RefreshContext(), AspireDraftLength(), mixed=None),
    "adaptive": Method(BlendContext(), AdaptiveDraftLength(), mixed=None),
    "oracle": Method(RefreshContext(), OracleDraftLength(), mixed=None),
}


# Most drafts of `adaptive` where rows mix: a verification's products hide behind what is read anyway, and a row that
# drafts on holds up nobody (docs/simulation.md has what it gains). Marching rows never come near its own default.
MIXING_D_MAX = 32
# Options that follow another one down where only that one is given.
_BOUNDED = {"gamma_init": "d_max", "recent": "k_min", "sinks": "least"}


def configure(
    config: ModelConfig,
    method: str | Method = "aspire",
    *,
    batch: int,
    capacity: int,
    max_new: int,
    options: Mapping[str, Any] | None = None,
    implementation: str | None = None,
    platform: str | None = None,
    **engine: Any,
) -> Engine:
    """An engine for `method`.

    Args:
      batch: slots.
      capacity: tokens a slot must hold, prompt and completion; rounded up to whole pages (whole blocks of them where
        `reproducible`).
      max_new: most tokens a request may emit.
      options: fields of the method's two policies by name, "mixed" and "page_size", in place of the table's.
      implementation: of attention, "xla" or "pallas"; None takes the best for the platform.
      platform: where the engine is to run ("cpu", "gpu"); the default backend's unless given.
      **engine: further fields of `Engine` (`dtype`, `page_size`, `unrolled`, ...).

    Raises:
      ValueError: no such method, an option no policy of it has, a value out of range, or an implementation that cannot
        serve the model on the platform.
    """
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"method: {method!r}, expected one of {', '.join(METHODS)}")
        name, method = method, METHODS[method]
    else:
        name = type(method).__name__
    left = dict(options or {})
    for field, bound in _BOUNDED.items():
        default = getattr(method.context, field, getattr(method.draft_length, field, None))
        if bound in left and field not in left and default is not None:
            left[field] = min(default, left[bound])
    mixed = left.pop("mixed", method.mixed)
    chosen = choose(config, implementation, platform, engine)
    if chosen == "pallas":
        engine = {"unrolled": False, "dense": False} | engine
    mixed = chosen == "pallas" if mixed is None else mixed
    if name == "adaptive" and mixed:
        left.setdefault("d_max", MIXING_D_MAX)
    page_size = engine["page_size"] = left.pop("page_size", engine.get("page_size", 16))
    context = _with_options(method.context, left)
    draft_length = _with_options(method.draft_length, left)
    if left:
        raise ValueError(f"option {next(iter(left))!r}: method {name!r} has no such option")
    if isinstance(draft_length, AspireDraftLength) and draft_length.in_step is None:
        draft_length = dataclasses.replace(draft_length, in_step=not mixed)
    if getattr(context, "renew", "") is None:  # the same question of every policy that renews
        context = dataclasses.replace(context, renew="step" if mixed else "verification")
    if getattr(draft_length, "positions", 0) is None:
        draft_length = dataclasses.replace(draft_length, positions=max_new)
    if page_size < 1:
        raise ValueError(f"page_size: {page_size}, expected at least 1")
    grain = block_of(page_size) if engine.get("reproducible") else page_size
    capacity = -(-capacity // grain) * grain
    return Engine(
        config=config,
        context=context,
        draft_length=draft_length,
        batch=batch,
        capacity=capacity,
        max_new=max_new,
        mixed=mixed,
        implementation=chosen,
        **engine,
    )


def _with_options(policy: Any, options: dict[str, Any]) -> Any:
    """The policy with its own fields among the options, which are taken out."""
    known = {f.name for f in dataclasses.fields(policy)}
    return dataclasses.replace(policy, **{key: options.pop(key) for key in list(options) if key in known})
