"""Traces as files: NumPy's npz with these arrays, format 1.

meta            JSON text: format (1), model, dtype, method, context (the context policy's name), options (its fields),
                d_max, page_size, cadence ("accepted" or "every"), versions (of aspire_jax, jax and numpy)

R requests:
ids             [R] text, the requests' own
prompt_tokens   [R] int32
emitted         [R] int32, tokens of the answer
tokens          [R, max] int32, the answer, padded with -1

N draft starts, ordered by request and position. A draft starts behind an emitted token; none does before the first
token, which comes from the prompt alone, or where only one token more may be emitted:
request         [N] int32, index into the R
position        [N] int32, tokens emitted before
length          [N] int32, committed tokens of context: prompt_tokens - 1 + position
drafted         [N] int32, drafts made: d_max, or as many as the request had room for
accepted        [N] int32, leading drafts equal to the target's tokens, up to and with a stop token
draft           [N, d_max] int32, the drafted tokens, -1 where none

By draft, float32, NaN where nothing was drafted or measured:
top_probability [N, d_max] of the drafted token
margin          [N, d_max] its logit above the second best
entropy         [N, d_max] of the draft's distribution, in nats
outside         [N, d_max] share of the attention on committed tokens outside the selection, at the layers that read
                everything while drafting; mean over query heads and those layers
recall          [N, d_max] share of the attention to committed tokens, by the verification's query at the draft's place,
                that lies in the pages the draft read; mean over query heads and all layers

Attention is measured against committed tokens, those in the cache; drafts attend to each other besides.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from aspire_jax.errors import InputError

FORMAT = 1
MEASURED = ("top_probability", "margin", "entropy", "outside", "recall")
# Arrays by name: their axes and dtype.
_ARRAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "ids": (("R",), "U"),
    "prompt_tokens": (("R",), "int32"),
    "emitted": (("R",), "int32"),
    "tokens": (("R", "max"), "int32"),
    **dict.fromkeys(("request", "position", "length", "drafted", "accepted"), (("N",), "int32")),
    "draft": (("N", "d_max"), "int32"),
    **dict.fromkeys(MEASURED, (("N", "d_max"), "float32")),
}
_META = {"model": str, "method": str, "context": str, "options": dict, "d_max": int, "page_size": int, "cadence": str}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """A recorded trace; the fields are the arrays of the file (see the module), `meta` is parsed."""

    meta: dict[str, Any]
    ids: np.ndarray
    prompt_tokens: np.ndarray
    emitted: np.ndarray
    tokens: np.ndarray
    request: np.ndarray
    position: np.ndarray
    length: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    draft: np.ndarray
    top_probability: np.ndarray
    margin: np.ndarray
    entropy: np.ndarray
    outside: np.ndarray
    recall: np.ndarray

    @property
    def d_max(self) -> int:
        """Most drafts of a start."""
        return int(self.meta["d_max"])

    def summary(self) -> dict[str, Any]:
        """Its size, and means over all draft starts."""
        starts = len(self.request)
        means = {"drafted_mean": self.drafted, "accepted_mean": self.accepted}
        return {
            "requests": len(self.ids),
            "tokens": int(self.emitted.sum()),
            "starts": starts,
            **{name: float(x.mean()) if starts else 0.0 for name, x in means.items()},
        }

    def save(self, path: str | Path) -> None:
        """Writes the file, complete or not at all.

        Raises:
          OSError: it cannot be written.
        """
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        meta = np.array(json.dumps(self.meta, sort_keys=True))
        try:
            with open(partial, "wb") as file:
                np.savez_compressed(file, meta=meta, **{name: getattr(self, name) for name in _ARRAYS})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def plan(self, request: int, positions: int) -> np.ndarray:
        """Drafts to make behind so many emitted tokens of a request so that none is rejected: [positions] int32."""
        plan = np.zeros(positions, np.int32)
        mine = (self.request == request) & (self.position < positions)
        plan[self.position[mine]] = self.accepted[mine]
        return plan


def load(path: str | Path) -> Trace:
    """Reads a trace and checks it.

    Raises:
      InputError: one line that names the file, the array or field, its value and what was expected.
    """
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise InputError(f"{path}: one array, expected a trace (npz)")
            arrays = {name: file[name] for name in file.files}
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}, expected a trace (npz)") from error
    except Exception as error:  # whatever damaged data makes zipfile, zlib and NumPy's parser of headers raise
        raise InputError(f"{path}: not a readable npz file ({error}), expected a trace") from error
    trace = _checked(str(path), arrays)
    _check_values(str(path), trace)
    return trace


def _checked(path: str, arrays: dict[str, np.ndarray]) -> Trace:
    """The trace, its arrays all there with fitting shapes and dtypes."""
    for name in ("meta", *_ARRAYS):
        if name not in arrays:
            raise InputError(f"{path}: {name}: missing, expected a trace of format {FORMAT}")
    try:
        meta = json.loads(str(arrays["meta"]))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: meta: not JSON ({error}), expected an object") from error
    if not isinstance(meta, dict):
        raise InputError(f"{path}: meta: {meta!r}, expected an object")
    if meta.get("format") != FORMAT:
        raise InputError(f"{path}: meta: format {meta.get('format')!r}, expected {FORMAT}")
    for name, kind in _META.items():
        if not isinstance(meta.get(name), kind) or isinstance(meta[name], bool):
            raise InputError(f"{path}: meta: {name} {meta.get(name)!r}, expected {kind.__name__}")
    if meta["cadence"] not in ("accepted", "every"):
        raise InputError(f"{path}: meta: cadence {meta['cadence']!r}, expected accepted or every")
    sizes = {"R": arrays["ids"].shape[:1], "N": arrays["request"].shape[:1], "d_max": (meta["d_max"],)}
    sizes["max"] = arrays["tokens"].shape[1:2]
    for name, (axes, dtype) in _ARRAYS.items():
        x = arrays[name]
        if x.dtype.kind != dtype if dtype == "U" else x.dtype != dtype:
            raise InputError(f"{path}: {name}: {x.dtype}, expected {'text' if dtype == 'U' else dtype}")
        want = tuple(n for axis in axes for n in sizes[axis])
        if x.shape != want or len(want) != len(axes):
            raise InputError(f"{path}: {name}: shape {x.shape}, expected [{', '.join(axes)}] = {want}")
    return Trace(meta=meta, **{name: arrays[name] for name in _ARRAYS})


def _check_values(path: str, t: Trace) -> None:
    """Numbers that whoever replays the trace would stumble over."""

    def demand(name: str, good: np.ndarray, expected: str) -> None:
        if not good.all():
            at = int(np.argmin(good))
            raise InputError(f"{path}: {name}[{at}]: {getattr(t, name)[at]}, expected {expected}")

    demand("emitted", (t.emitted >= 0) & (t.emitted <= t.tokens.shape[1]), f"0 to {t.tokens.shape[1]}")
    demand("request", (t.request >= 0) & (t.request < len(t.ids)), f"0 to {len(t.ids) - 1}")
    order = t.request.astype(np.int64) * (1 << 31) + t.position
    demand("position", np.append(True, order[1:] > order[:-1])[: len(order)], "starts ordered by request and position")
    demand("position", (t.position >= 0) & (t.position < t.emitted[t.request]), "fewer than the request emitted")
    demand("length", t.length == t.prompt_tokens[t.request] - 1 + t.position, "prompt_tokens - 1 + position")
    demand("drafted", (t.drafted >= 1) & (t.drafted <= t.d_max), f"1 to d_max ({t.d_max})")
    demand("accepted", (t.accepted >= 0) & (t.accepted <= t.drafted), "0 to drafted")
