"""Progress: a bar on a terminal, few plain lines elsewhere."""

from __future__ import annotations

import io

from convert.progress import Reporter, silent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_are_few() -> None:
    stream, now = io.StringIO(), [0.0]
    with Reporter(stream, clock=lambda: now[0]) as report:
        for done in range(101):
            report("weights", done << 20, 100 << 20)
            now[0] += 0.25
        report("checksums", 1 << 20, 1 << 20)
    assert stream.getvalue().splitlines() == [
        "weights: 0 of 100 MiB",
        "weights: 40 of 100 MiB",
        "weights: 80 of 100 MiB",
        "weights: 100 of 100 MiB",
        "checksums: 1 of 1 MiB",
    ]


def test_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    with Reporter(stream) as report:
        for done in (25, 50, 100):
            report("weights", done << 20, 100 << 20)
        report("checksums", 1, 1)
    text = stream.getvalue()
    assert "\r" in text and "weights: 100%" in text and "checksums: 100%" in text and text.endswith("\n")


def test_silent() -> None:
    silent("weights", 1, 2)
