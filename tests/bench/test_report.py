"""bench.report: one file that needs no other, whatever ran, failed or found no time."""

from __future__ import annotations

import re

import pytest

from bench import machine, report

PART = report.Part("ceiling", "A title", "What to <look> at.")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Puts a script in the place of a benchmark, the only one of the report."""
    monkeypatch.setattr(report, "PARTS", (PART,))

    def write(body):
        folder = tmp_path / "bench"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "ceiling.py").write_text(f"import sys, pathlib\nfiles = sys.argv[1:]\n{body}")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return write


WRITES = """
pathlib.Path(files[files.index("--json") + 1]).write_text('{"figure": 3}')
pathlib.Path(files[files.index("--plot") + 1]).write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
print("printed & told", files[:2])
"""


def test_a_part_that_ran(module):
    run = report.run_part(PART, ["--data"], module(WRITES), 60)
    assert run["outcome"] == "done" and run["results"] == {"figure": 3} and run["picture"].startswith("<svg")
    assert run["text"] == "printed & told ['--quick', '--data']"
    text = report.page({"command": "python -m bench.report", "machine": machine.describe(), "parts": [run]})
    assert "What to &lt;look&gt; at." in text and "printed &amp; told" in text and "&quot;figure&quot;: 3" in text
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sources and all(s.startswith(("data:", "#")) for s in sources)  # nothing is loaded from elsewhere


@pytest.mark.parametrize(
    ("body", "seconds", "outcome"),
    [
        (WRITES + "sys.exit(1)", 60, "done, and it did not pass"),
        ("print('error: no data')\nsys.exit(2)", 60, "failed with exit code 2: error: no data"),
        ("print('begun', flush=True)\nimport time\ntime.sleep(60)", 31, "not finished: the time was used up"),
        (WRITES, 5, "not run: no time was left"),
    ],
)
def test_a_part_that_did_not(module, body, seconds, outcome, monkeypatch):
    if seconds == 31:
        real = report.subprocess.Popen.communicate
        limit = [5, None]
        monkeypatch.setattr(
            report.subprocess.Popen, "communicate", lambda child, **_: real(child, timeout=limit.pop(0))
        )
    run = report.run_part(PART, [], module(body), seconds)
    assert run["outcome"] == outcome
    text = report.page({"command": "", "machine": machine.describe(), "parts": [run]})
    assert outcome in text
    if seconds == 31:
        assert run["text"] == "begun"


def test_every_part_exists():
    import importlib.util

    assert [p.name for p in report.PARTS if importlib.util.find_spec(f"bench.{p.name}") is None] == []
