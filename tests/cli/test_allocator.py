"""A decoding command starts itself again with its memory settings, once, and runs all the same where it cannot."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aspire_jax import cli
from aspire_jax.cli import allocator

_ROOT = Path(__file__).parents[2]
_GLIBC = pytest.mark.skipif(not allocator._takes_settings(), reason="the settings are those of glibc 2.35 and later")
_OWN = (allocator.VARIABLE, "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_")
# Python imports this at every start: it notes the process and what settings it has.
_NOTE = f"""
import os
with open(os.environ["STARTS"], "a") as file:
    print(os.getpid(), os.environ.get("{allocator.VARIABLE}"), file=file)
"""


@pytest.fixture
def starts(tmp_path):
    """Runs a program with `sitecustomize` as above; its exit code, and pid and settings of each start."""
    (tmp_path / "sitecustomize.py").write_text(_NOTE)

    def run(command: list[str], stdin: str = "", **extra: str) -> tuple[int, list[list[str]]]:
        log = tmp_path / "starts"
        log.write_text("")
        env = {name: value for name, value in os.environ.items() if name not in _OWN}
        env |= {"STARTS": str(log), "PYTHONPATH": f"{tmp_path}:{_ROOT}", **extra}
        done = subprocess.run(command, input=stdin, text=True, env=env, timeout=120, capture_output=True, check=False)
        return done.returncode, [line.split() for line in log.read_text().splitlines()]

    return run


def command(name: str, folder: Path) -> list[str]:
    """A command with good arguments whose model is missing."""
    model, missing = ["--model", str(folder / "model")], str(folder / "in.jsonl")
    rest = {
        "generate": [*model, "--prompt", "a b"],
        "trace": [*model, "--input", missing, "--out", str(folder / "out.npz")],
        "demo": model,
        "info": [str(folder / "model")],
    }
    return [name, *rest[name]]


@_GLIBC
@pytest.mark.parametrize("name", ["generate", "trace", "demo"])
def test_started_again_once(name, starts, tmp_path):
    code, noted = starts([sys.executable, "-m", "aspire_jax", *command(name, tmp_path)])
    assert code == 2 and [settings for _, settings in noted] == ["None", allocator.SETTINGS]
    assert noted[0][0] == noted[1][0]  # whoever started it waits for, and signals, the same process


def test_the_console_script_is_that_process():
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["aspire"] == "aspire_jax.cli:process"


@_GLIBC
def test_the_console_script_is_started_again(starts, tmp_path):
    script = tmp_path / "aspire"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom aspire_jax.cli import process\nsys.exit(process())\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    code, noted = starts([str(script), *command("generate", tmp_path)])
    assert code == 2 and len(noted) == 2


def test_only_a_process_of_its_own(starts, tmp_path):
    """Nothing to decode, bad arguments, or a program that calls the command and has done other work before."""
    line, call = command("generate", tmp_path), "from aspire_jax.cli import process\nraise SystemExit(process())"
    (tmp_path / "host.py").write_text(call)
    programs = [
        ["-m", "aspire_jax", *command("info", tmp_path)],
        ["-m", "aspire_jax", "generate"],
        ["-c", call, *line],
        [str(tmp_path / "host.py"), *line],
        ["-", *line],
    ]
    for program in programs:
        code, noted = starts([sys.executable, *program], stdin=call)
        assert code == 2 and len(noted) == 1, program


@pytest.fixture
def own(monkeypatch):
    """This process as one that was started for a command; the calls that would replace it."""
    calls = []
    for name in [*_OWN, *(name for name in os.environ if name.startswith("MALLOC_"))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.35"))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-W", "ignore", "-m", "aspire_jax", "generate", "x"])
    monkeypatch.setattr(sys, "argv", ["/somewhere/aspire_jax/__main__.py", "generate", "x"])
    return calls


def test_what_is_started(own):
    allocator.settle()
    program, arguments, environment = own[0]
    assert program == sys.executable and environment == {**os.environ, allocator.VARIABLE: allocator.SETTINGS}
    assert arguments == [sys.executable, "-X", "aspire_settled", *sys.orig_argv[1:]]


@pytest.mark.parametrize("name", _OWN)
@pytest.mark.parametrize("value", ["", "glibc.malloc.top_pad=4096"])
def test_ones_own_settings_are_kept(own, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    allocator.settle()
    assert not own


def test_once_even_where_the_variable_is_lost(own, monkeypatch):
    monkeypatch.setattr(sys, "_xoptions", {"aspire_settled": True})
    allocator.settle()
    assert not own


@pytest.mark.parametrize("found", [("glibc", "2.34"), ("glibc", "2.9"), ("musl", "1.2.5"), ("", "")], ids=str)
def test_other_libraries(own, monkeypatch, found):
    monkeypatch.setattr(platform, "libc_ver", lambda: found)
    allocator.settle()
    assert not own


def test_debuggers_and_nameless_interpreters(own, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    allocator.settle()
    monkeypatch.setattr(sys, "executable", "python")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pdb", "-m", "aspire_jax", "generate", "x"])
    allocator.settle()
    assert not own


def test_a_system_that_refuses(own, monkeypatch):
    def refuses(*call):
        own.append(call)
        raise PermissionError("not here")

    monkeypatch.setattr(os, "execve", refuses)
    allocator.settle()
    assert len(own) == 1


def test_a_program_that_calls_main_is_left_alone(own, tmp_path):
    assert cli.main(command("generate", tmp_path)) == 2 and not own
