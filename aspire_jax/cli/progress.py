"""Progress of decoding on standard error: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from aspire_jax.results import Report


class Reporter:
    """Shows reports; a context manager that closes the bar."""

    _EVERY = 10.0  # seconds between plain lines

    def __init__(
        self, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet, self._clock = quiet, clock
        self._bar: Any = None
        self._stage: tuple[str, str] = ("", "")
        self._printed = 0.0

    def __call__(self, report: Report, label: str = "") -> None:
        """Shows `report`; `label` names the method where there are several."""
        if self._quiet:
            return
        stage = (label, report.stage)
        if self._stream.isatty():
            self._show(report, stage)
        elif stage != self._stage or self._clock() - self._printed >= self._EVERY or report.finished == report.requests:
            self._printed = self._clock()
            print(_line(report, label), file=self._stream, flush=True)
        self._stage = stage

    def _show(self, report: Report, stage: tuple[str, str]) -> None:
        from tqdm import tqdm

        if stage != self._stage:
            self.close()
            label = " ".join(part for part in stage if part)
            form = (
                "{desc}"
                if report.stage == "compile"
                else "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {postfix}"
            )
            self._bar = tqdm(desc=label, total=1, unit=" tokens", file=self._stream, leave=False, bar_format=form)
        done, total = _amount(report)
        self._bar.total = max(total, 1)
        self._bar.n = done
        if report.stage == "decode":
            self._bar.set_postfix_str(_rates(report), refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _amount(report: Report) -> tuple[int, int]:
    if report.stage == "decode":
        return report.completion_tokens, report.planned_tokens
    return report.prefilled + report.reused, report.prompt_tokens


def _rates(report: Report) -> str:
    text = f"{report.tokens_per_second:.1f} tokens/s"
    return f"{text}, acceptance {report.acceptance:.0%}" if report.drafted else text


def _line(report: Report, label: str) -> str:
    start = f"{label}: " if label else ""
    if report.stage == "compile":
        return f"{start}compiling (once for each size; kept on disk)"
    done, total = _amount(report)
    line = f"{start}{report.stage} {done:,} of {total:,} tokens"
    if report.stage == "decode":
        line += f", {report.finished} of {report.requests} done, {_rates(report)}"
    return line
