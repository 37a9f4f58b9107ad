"""What a study is, and the small things their pictures have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bench.studies.runs import Runs

Result = dict[str, Any]
Panel = Callable[["Axes", Result], None]

PAPER, OURS = plots.INK, plots.colours(["aspire"])["aspire"]


class Study(NamedTuple):
    """One study.

    Attributes:
      name: on the command line, in the JSON, and of its picture.
      title: of its picture.
      paper: the figure or table of the paper that it stands beside.
      measure: the result, as JSON has it.
      panels: each draws a part of the result into its axes, with names of both.
      tell: the result in a few lines.
    """

    name: str
    title: str
    paper: str
    measure: Callable[[Runs], Result]
    panels: tuple[Panel, ...]
    tell: Callable[[Result], list[str]]


def head(axes: Axes, title: str, x: str, y: str) -> None:
    """A panel's title and the names of its axes."""
    axes.set_title(title, fontsize=10, loc="left", color=plots.INK)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)


def legend(axes: Axes, columns: int = 1, place: str = "best") -> None:
    """The panel's legend, inside it."""
    axes.legend(fontsize=7, frameon=False, ncols=columns, loc=place)


def remark(axes: Axes, text: str, x: float = 0.03, y: float = 0.05) -> None:
    """A line inside a panel, at a place in shares of its size."""
    axes.text(
        x, y, text, transform=axes.transAxes, fontsize=7, color="#555555", va="bottom" if y < 0.5 else "top"
    )  # fmt: skip
