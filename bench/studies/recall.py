"""Recall of attention mass by where a selection comes from (figure 2c).

Of the attention that a token behind the prompt pays to the prompt, how much lies in the pages that a source names? What
stands behind the prompt is read by every method alike and left out. Pages are ranked by ASPIRE's score, except by the
policies that do not look at it, which are the library's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from aspire_jax.config import ModelConfig
from aspire_jax.context import PromptWeights, Room, SnapKVContext, StreamingContext
from aspire_jax.errors import InputError
from bench import plots
from bench.studies import attention
from bench.studies.attention import Attention
from bench.studies.runs import PAGE, Runs
from bench.studies.study import OURS, Result, Study, head, remark

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAGS = (0, 1, 2, 4, 8, 16)
GAMMA = 5


def top(score: np.ndarray, pages: int) -> np.ndarray:
    """The highest-scoring pages: mask of `score`'s shape [..., P]."""
    best = np.argsort(-score, axis=-1, kind="stable")[..., :pages]
    mask = np.zeros(score.shape, bool)
    np.put_along_axis(mask, best, True, axis=-1)
    return mask


def share(mass: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Share of `mass` [..., P] inside a mask [..., P]: [...]."""
    total = mass.sum(axis=-1)
    return np.where(mask, mass, 0.0).sum(axis=-1) / np.where(total > 0, total, 1.0)


def by_lag(a: Attention, pages: int) -> np.ndarray:
    """Recall [lags] by a layer's own pages so many tokens before; the same tokens and layers for every lag."""
    first, mass = LAGS[-1], a.mass
    count = mass.shape[1] - first
    mask = top(a.score, pages)
    return np.array([share(mass[:, first:], mask[:, first - lag : first - lag + count]).mean() for lag in LAGS])


def by_distance(a: Attention, pages: int) -> np.ndarray:
    """Recall [L / 2 + 1] by the pages of a layer so many layers before, of the same token; for the upper half."""
    mass, mask, most = a.mass, top(a.score, pages), a.mass.shape[0] // 2
    upper = mass.shape[0] - most
    return np.array([share(mass[most:], mask[most - d : most - d + upper]).mean() for d in range(most + 1)])


def refresh_layers(layers: int) -> dict[str, int]:
    """The refresh layers to compare, by the names of pictures: the paper's, and one at two thirds of the depth."""
    return {"refresh layer N-2": max(layers - 2, 0), "refresh layer 2N/3": 2 * layers // 3}


def by_source(a: Attention, config: ModelConfig, pages: int) -> dict[str, np.ndarray]:
    """Recall of each source in each layer [L], mean over tokens; the same tokens for every source."""
    lag = LAGS[-1]
    mass, mask = a.mass[:, lag:], top(a.score, pages)
    count = mass.shape[1]
    before = mask[:, lag - 1 : lag - 1 + count]
    out = {
        "own layer, this token": share(mass, mask[:, lag:]).mean(axis=1),
        "own layer, token before": share(mass, before).mean(axis=1),
        f"own layer, {lag} tokens before": share(mass, mask[:, :count]).mean(axis=1),
    }
    for name, layer in refresh_layers(config.n_layers).items():
        out[f"{name}, token before"] = share(mass, np.broadcast_to(before[layer], mass.shape)).mean(axis=1)
    by_head = a.by_head[:, lag:]
    snap = _snapkv(a, config, pages)[:, None]  # [L, 1, Hkv, P]
    # Each KV head reads pages of its own.
    inside = np.where(snap, by_head, 0.0).mean(axis=2).sum(axis=-1)
    out["snapkv, at the prompt's end"] = (inside / mass.sum(axis=-1)).mean(axis=1)
    out["streaming: first and last pages"] = share(mass, np.broadcast_to(_streaming(a, pages), mass.shape)).mean(axis=1)
    return out


def _room(a: Attention) -> Room:
    return Room(a.score.shape[-1], PAGE, 1, 1)


def _mask(selection: np.ndarray, pages: int) -> np.ndarray:
    """Page numbers [..., k], -1 where unused, as a mask [..., pages]."""
    return (selection[..., None] == np.arange(pages)).any(axis=-2)


def _streaming(a: Attention, pages: int) -> np.ndarray:
    room = _room(a)
    lengths = jnp.asarray([room.pages * PAGE], jnp.int32)
    chosen = StreamingContext(budget=pages * PAGE, sinks=PAGE).select((), lengths, room)
    return _mask(np.asarray(chosen)[0, 0], room.pages)


def _snapkv(a: Attention, config: ModelConfig, pages: int) -> np.ndarray:
    """Its pages, those of its window among them: mask [L, Hkv, P]."""
    room = _room(a)
    tokens = room.pages * PAGE
    policy = SnapKVContext(budget=pages * PAGE, window=min(attention_window(pages), tokens))
    prompt = PromptWeights(jnp.asarray([True]), jnp.int32(min(a.start, tokens)), jnp.asarray(a.window[..., :tokens]))
    state = policy.observe_prompt(policy.init(config, 1, room), prompt)
    chosen = policy.select(state, jnp.asarray([tokens], jnp.int32), room)
    return _mask(np.asarray(chosen)[:, 0], room.pages)


def attention_window(pages: int) -> int:
    """Last tokens of the prompt that SnapKV looks at: its own 32, fewer where the budget is small."""
    return min(SnapKVContext().window, pages * PAGE // 2)


def measure(runs: Runs) -> Result:
    """Recall by lag, by distance of layers and by source, mean over layers, tokens and prompts.

    Raises:
      InputError: answers too short for the longest lag, or prompts shorter than the budget.
    """
    config, pages = runs.model.config, runs.sizes.budget // PAGE
    if runs.sizes.max_tokens <= LAGS[-1] + 1:
        raise InputError(f"--max-tokens: {runs.sizes.max_tokens}, expected more than {LAGS[-1] + 1} for recall")
    least = min(len(r.tokens) for r in runs.requests) // PAGE
    if pages < 2 or pages >= least:
        raise InputError(f"--budget: {runs.sizes.budget}, expected {2 * PAGE} tokens to fewer than {least * PAGE}")
    runs.accepted(runs.context(), GAMMA)  # the answers
    assert runs.group.answers is not None
    lags, distances, sources = [], [], []
    for request, answer in zip(runs.requests, runs.group.answers, strict=True):
        # The first token of an answer comes from the prompt's last, so the last of an answer attends to nothing yet.
        a = attention.measured(runs.model, request.tokens, answer[: request.max_new], PAGE, attention_window(pages))
        lags.append(by_lag(a, pages))
        distances.append(by_distance(a, pages))
        sources.append(by_source(a, config, pages))
    return {
        "pages": pages,
        "of": float(np.mean([len(r.tokens) // PAGE for r in runs.requests])),
        "by_lag": _rows("lag", LAGS, lags),
        "by_distance": _rows("layers", range(len(distances[0])), distances),
        "by_source": [_source(name, [s[name] for s in sources]) for name in sources[0]],
        "paper": {
            "pages": 100,
            "finding": "the same layer's pages of earlier tokens: falls quickly with the lag; earlier layers' pages of "
            "the same token: falls slowly",
        },
    }


def _rows(name: str, values: Sequence[int], found: list[np.ndarray]) -> list[Result]:
    table = np.stack(found)
    error = _error(table)
    return [
        {name: int(v), "recall": float(table[:, i].mean()), "standard_error": float(error[i])}
        for i, v in enumerate(values)
    ]


def _source(name: str, found: list[np.ndarray]) -> Result:
    table = np.stack(found)  # [prompts, L]
    means = table.mean(axis=1)
    return {
        "source": name,
        "recall": float(means.mean()),
        "standard_error": float(_error(means[:, None])[0]),
        "by_layer": table.mean(axis=0).tolist(),
    }


def _error(table: np.ndarray) -> np.ndarray:
    """Standard error over prompts, zero of one."""
    n = table.shape[0]
    return table.std(axis=0, ddof=1) / np.sqrt(n) if n > 1 else np.zeros(table.shape[1])


def curves(axes: Axes, result: Result) -> None:
    """Recall by lag and by distance in one panel: tokens and layers share the axis."""
    styles = (
        ("by_lag", "lag", "same layer, so many tokens before (all layers)", "#D55E00", "o-"),
        ("by_distance", "layers", "same token, so many layers before (upper half of the layers)", OURS, "s-"),
    )
    for key, field, label, colour, style in styles:
        rows = result[key]
        axes.errorbar(
            [r[field] for r in rows], [100 * r["recall"] for r in rows], [100 * r["standard_error"] for r in rows],
            fmt=style, color=colour, markersize=4, linewidth=1.2, capsize=2, label=label,
        )  # fmt: skip
    low = min(r["recall"] for key, *_ in styles for r in result[key])
    axes.set_ylim(max(0.0, 100 * low - 25), 105)
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.12))
    remark(
        axes,
        "paper (figure 2c, 100 pages; curves without numbers): the lag costs quickly, the layers slowly",
        0.03,
        0.03,
    )
    title = f"Recall: the {result['pages']} best pages of {result['of']:.0f}, taken from elsewhere"
    head(axes, title, "distance of the source, tokens or layers", "recall of attention to the prompt, %")


def bars(axes: Axes, result: Result) -> None:
    """Recall by source, mean over layers, with each layer as a point."""
    rows = list(reversed(result["by_source"]))
    for i, row in enumerate(rows):
        axes.barh(i, 100 * row["recall"], 0.62, color="#A9CDE4")
        layers = [100 * v for v in row["by_layer"]]
        axes.plot(layers, [i] * len(layers), "|", color=plots.INK, markersize=7, alpha=0.6)
        axes.text(103, i, f"{100 * row['recall']:.0f}", va="center", fontsize=8, color=plots.INK)
    axes.set_yticks(
        range(len(rows)), [row["source"].replace(", ", ",\n").replace(": ", ":\n") for row in rows], fontsize=8
    )
    axes.set_xlim(0, 110)
    axes.grid(visible=False, axis="y")
    head(axes, "Recall by where a draft's pages come from", "recall of attention to the prompt, %; marks: layers", "")


def tell(result: Result) -> list[str]:
    def line(rows: list[Result], field: str) -> str:
        return ", ".join(f"{r[field]}: {r['recall']:.3f}" for r in rows)

    return [
        f"recall of attention to the prompt in {result['pages']} of {result['of']:.0f} pages",
        f"same layer, tokens before: {line(result['by_lag'], 'lag')}",
        f"same token, layers before: {line(result['by_distance'], 'layers')}",
        *(f"  {r['source']:32s} {r['recall']:.3f} +- {r['standard_error']:.3f}" for r in result["by_source"]),
    ]


STUDY = Study(
    "recall",
    "Recall: how much of its attention a token finds in pages chosen elsewhere",
    "figure 2c",
    measure,
    (curves, bars),
    tell,
)
