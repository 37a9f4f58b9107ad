"""Progress on standard error: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TextIO


class Progress(Protocol):
    """Called with a stage's name, the bytes done in it and its total of bytes."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Reports."""


def silent(stage: str, done: int, total: int) -> None:
    """Reports nothing."""


class Reporter:
    """The `Progress` of the command line; a context manager that closes the bar."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._bar: object | None = None
        self._stage = ""
        self._printed = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows the state of `stage`."""
        if self._stream.isatty():
            self._show(stage, done, total)
        elif stage != self._stage or done >= total or self._clock() - self._printed >= 10.0:
            self._printed = self._clock()
            print(f"{stage}: {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB", file=self._stream, flush=True)
        self._stage = stage

    def _show(self, stage: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if stage != self._stage:
            self._close()
            self._bar = tqdm(total=total, desc=stage, unit="B", unit_scale=True, unit_divisor=1024, file=self._stream)
        bar = self._bar
        assert isinstance(bar, tqdm)
        bar.update(done - bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()  # type: ignore[attr-defined]
        self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
