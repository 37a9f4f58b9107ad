"""Progress: a bar on a terminal, plain lines otherwise, nothing where it is not wanted."""

from __future__ import annotations

import io

from aspire_jax.cli.progress import Reporter
from aspire_jax.results import Report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, quiet: bool = False) -> str:
    now = iter(range(0, 1000, 4))
    with Reporter(quiet=quiet, stream=stream, clock=lambda: float(next(now))) as tell:
        report = Report(requests=2, prompt_tokens=100, planned_tokens=80)
        tell(report, "aspire")
        report.stage = "prefill"
        for done in (50, 100):
            report.prefilled = done
            tell(report, "aspire")
        report.stage, report.decode_seconds, report.drafted, report.accepted = "decode", 2.0, 10, 7
        for tokens in range(10, 90, 10):
            report.completion_tokens = tokens
            report.finished = tokens // 40
            tell(report, "aspire")
    return stream.getvalue()


def test_plain_lines():
    lines = run(io.StringIO()).splitlines()
    assert lines[0] == "aspire: compiling (once for each size; kept on disk)"
    assert lines[1] == "aspire: prefill 50 of 100 tokens"
    assert lines[2] == "aspire: decode 10 of 80 tokens, 0 of 2 done, 5.0 tokens/s, acceptance 70%"
    assert lines[-1] == "aspire: decode 80 of 80 tokens, 2 of 2 done, 40.0 tokens/s, acceptance 70%"
    assert len(lines) < 8  # not one a report


def test_a_bar_on_a_terminal():
    text = run(Terminal())
    assert "aspire compile" in text and "aspire prefill  50%|" in text and "50/100" in text
    assert "aspire decode 100%|" in text and "40.0 tokens/s, acceptance 70%" in text


def test_quiet():
    assert run(Terminal(), quiet=True) == run(io.StringIO(), quiet=True) == ""
