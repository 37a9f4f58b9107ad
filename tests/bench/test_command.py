"""What every benchmark's command line does alike: help, one line for bad input, JSON and picture whole or none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from aspire_jax.errors import InputError
from bench import command


def parser():
    made = command.parser("some", "What it measures.", quick="less", plot="a line")
    made.add_argument("--n", type=int, default=1)
    return made


def measure(args, say):
    if args.n < 0:
        raise InputError(f"--n: {args.n}, expected\nmore")
    say("measuring")
    return {"n": args.n}


def run(*arguments, **more):
    return command.run(parser(), measure, lambda results, file: None, arguments, **more)


def test_results_with_the_command_that_made_them(tmp_path, capsys):
    assert run("--n", "3", "--json", str(tmp_path / "x.json")) == 0
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "command": f"python -m bench.some --n 3 --json {tmp_path}/x.json",
        "n": 3,
    }
    assert capsys.readouterr().out == "measuring\n"
    assert run("--json", "-") == 0 and json.loads(capsys.readouterr().out)["n"] == 1
    assert run(passed=lambda results: results["n"] > 1) == 1


def test_what_there_is_outlives_a_crash(tmp_path):
    def crash(args, say):
        say.keep({"cells": [1]})
        raise RuntimeError

    def go_on(args, say):
        say.keep({"cells": [1]})
        return {"cells": [1, 2]}

    arguments = ["--json", str(tmp_path / "x.json")]
    with pytest.raises(RuntimeError):
        command.run(parser(), crash, lambda results, file: None, arguments)
    kept = json.loads((tmp_path / "x.json.partial").read_text())
    assert kept["cells"] == [1] and kept["command"].startswith("python -m bench.some")
    assert not (tmp_path / "x.json").exists()
    assert command.run(parser(), go_on, lambda results, file: None, arguments) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--n", "-1"), "--n: -1, expected more"),
        (("--plot", "x.pdf"), "--plot: x.pdf, expected a name that ends in .png or .svg"),
        (("--plot", "nowhere/x.png"), "--plot: nowhere/x.png, expected a folder that exists"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert told.err == f"python -m bench.some: error: {message}\n" and told.out == ""


def test_a_picture_needs_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert run("--plot", str(tmp_path / "x.png")) == 2
    assert "expected: pip install 'aspire-jax[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ceiling", "convert_memory", "exactness", "peers", "studies", "throughput"])
def test_every_benchmark_explains_itself(name):
    done = subprocess.run([sys.executable, "-m", f"bench.{name}", "--help"], capture_output=True, text=True, check=True)
    for option in ("--json FILE", "--plot FILE", "--quick"):
        assert option in done.stdout
