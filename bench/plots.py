"""Pictures that read without the text: one look for all of them, one colour a method.

Drawn through matplotlib's figure objects, without its global state; matplotlib is imported where a picture is made.
"""

from __future__ import annotations

import itertools
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people who see colours differently tell apart; grey for the reference.
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#B8A800")
_KNOWN = {
    "autoregressive": "#777777",
    "aspire": "#0072B2",
    "adaptive": "#D55E00",
    "aspire-fixed": "#56B4E9",
    "aspire-fsm": "#009E73",
    "vegas": "#CC79A7",
    "magicdec-streaming": "#E69F00",
    "magicdec-snapkv": "#8C564B",
    "oracle": "#222222",
}
INK, FAINT = "#222222", "#DDDDDD"
_STRIP = 0.28  # inches
_NOTE_CHARACTER = 0.056  # inches, about


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: a method has its own wherever it appears, others take those that are left, in order."""
    names = list(names)
    taken = {_KNOWN[n] for n in names if n in _KNOWN}
    left = itertools.cycle(c for c in _PALETTE if c not in taken)
    return {n: _KNOWN.get(n) or next(left) for n in names}


def figure(title: str, panels: int = 1, *, columns: int = 3, width: float = 4.4, height: float = 3.2) -> Any:
    """An empty figure with its title, and `panels` axes in rows of `columns`.

    Args:
      width, height: of one panel, in inches.

    Returns:
      the figure, and a list of its axes.
    """
    from matplotlib.figure import Figure

    columns = min(columns, panels)
    rows = -(-panels // columns)
    made: Any = Figure(
        figsize=(max(width * columns, 0.115 * len(title), 6.0), height * rows + 0.7), dpi=150, layout="constrained"
    )
    high = made.get_figheight()
    body, _ = made.subfigures(2, 1, height_ratios=[high - _STRIP, _STRIP])  # the strip is for the note
    body.suptitle(title, fontsize=12, fontweight="bold", color=INK, x=0.01, ha="left")
    axes = [body.add_subplot(rows, columns, i + 1) for i in range(panels)]
    for each in axes:
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
        each.grid(axis="y", color=FAINT, linewidth=0.8)
        each.set_axisbelow(True)
        each.tick_params(labelsize=8, colors=INK)
        each.title.set_fontsize(10)
    return made, axes


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    halves: Mapping[str, Sequence[float | None]] | None = None,
    *,
    label: str,
    text: str | None = "{:.2f}",
    most: float = math.inf,
) -> None:
    """Grouped bars with their intervals, each with its value above it.

    Args:
      groups: names along the axis.
      series: values of each series by its name, one a group; None leaves a gap.
      halves: half widths of the intervals, alike.
      label: of the vertical axis.
      text: format of the values; None for none.
      most: a bound of what is shown, where intervals reach beyond what there can be.
    """
    share = 0.84 / max(len(series), 1)
    colour = colours(series)
    for number, (name, values) in enumerate(series.items()):
        half = (halves or {}).get(name) or [None] * len(values)
        for place, (value, spread) in enumerate(zip(values, half, strict=True)):
            if value is None:
                continue
            x = place + (number - (len(series) - 1) / 2) * share
            axes.bar(x, value, 0.92 * share, color=colour[name], label=name if _first(values, place) else None)
            above = min(spread or 0.0, most - value)
            if spread:
                axes.errorbar(x, value, [[min(spread, abs(value))], [above]], color=INK, linewidth=1, capsize=2)
            if text:
                top = value + above
                size = 7 if share > 0.12 else 6
                axes.annotate(
                    text.format(value), (x, top), (0, 2), textcoords="offset points", ha="center", va="bottom",
                    fontsize=size, color=INK, rotation=90 if share < 0.13 else 0,
                )  # fmt: skip
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylabel(label, fontsize=9)
    axes.margins(y=0.18)


def intervals(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[dict[str, Any] | None]],
    *,
    label: str,
    text: str,
    most: float = math.inf,
) -> None:
    """As `bars`, of figures that `spread.interval` made."""
    means = {name: [None if v is None else v["mean"] for v in values] for name, values in series.items()}
    halves = {name: [None if v is None else v["half"] for v in values] for name, values in series.items()}
    bars(axes, groups, means, halves, label=label, text=text, most=most)


def _first(values: Sequence[float | None], place: int) -> bool:
    return all(v is None for v in values[:place])


def legend(axes: Axes, columns: int = 5) -> None:
    """One legend for all panels, below them, with what is in `axes`."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = min(columns, len(labels))
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def legend_in(axes: Axes) -> None:
    """A legend of one panel's own, inside it."""
    axes.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1, 1.12), ncols=3)


def note(made: Figure, text: str) -> None:
    """How it was measured, at the bottom: one line, or two where the figure is narrow."""
    lines = textwrap.wrap(text, int(made.get_figwidth() / _NOTE_CHARACTER))
    place = 0.3 if len(lines) == 1 else 0.0
    made.subfigs[1].text(0.01, place, "\n".join(lines), fontsize=7, color="#666666", ha="left", va="bottom")


def save(made: Figure, file: str) -> None:
    """Writes the picture, complete or not at all."""
    path = Path(file)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        made.savefig(partial, facecolor="white")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def where(header: Mapping[str, Any]) -> str:
    """One line on the machine, for `note`."""
    m = header.get("machine", {})
    parts = [header.get("model"), header.get("dtype"), f"{m.get('cores')} cores of {m.get('cpu')}"]
    if m.get("device") not in (None, "cpu"):
        parts[2] = m["device"]
    parts += [f"jax {m.get('jax')}", f"python {m.get('python')}", m.get("time")]
    return ", ".join(str(p) for p in parts if p)
