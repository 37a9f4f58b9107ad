"""A decoding command starts itself again with its memory settings, once, and runs all the same where it cannot."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from aspire_jax import cli
from aspire_jax.cli import allocator

_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
_CHILD = """
import json, os, sys
from aspire_jax.cli import allocator
before = os.environ.get("COUNT", "")
os.environ["COUNT"] = before + "x"
allocator.settle()
settings = os.environ.get(allocator.VARIABLE)
print(json.dumps([os.getpid(), os.environ["COUNT"], settings, sys.argv[1:], "jax" in sys.modules]))
"""


@pytest.fixture
def started(monkeypatch):
    """The calls that would replace this process; the environment has no settings."""
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.delenv(allocator.VARIABLE, raising=False)
    return calls


def child(settings: str | None) -> list:
    env = {name: value for name, value in os.environ.items() if name != allocator.VARIABLE}
    if settings is not None:
        env[allocator.VARIABLE] = settings
    command = [sys.executable, "-c", _CHILD, "a b", "--c"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as p:
        out, _ = p.communicate()
    found = json.loads(out)
    assert p.returncode == 0 and found[0] == p.pid  # whoever started it waits for, and signals, the same process
    return found[1:]


@_GLIBC
def test_started_again_once_with_the_same_arguments():
    assert child(None) == ["xx", allocator.SETTINGS, ["a b", "--c"], False]


@pytest.mark.parametrize("own", ["", "glibc.malloc.top_pad=4096"])
def test_ones_own_settings_are_kept(own):
    assert child(own) == ["x", own, ["a b", "--c"], False]


@_GLIBC
def test_only_a_process_that_decodes(started, monkeypatch, tmp_path):
    missing = str(tmp_path / "none.jsonl")
    line = ["generate", "--model", "smollm2-135m", "--input", missing, "--output", str(tmp_path / "out.jsonl")]
    for without in (["info", str(tmp_path)], ["generate"]):  # nothing to decode, or bad arguments
        monkeypatch.setattr(sys, "argv", ["aspire", *without])
        assert cli.process() == 2 and not started
    monkeypatch.setattr(sys, "argv", ["aspire", *line])
    assert cli.main() == cli.main(line) == 2 and not started  # called from a program: the process is not the command's
    assert cli.process() == 2 and len(started) == 1
    program, arguments, environment = started[0]
    assert program == arguments[0] == sys.executable and arguments[1:] == sys.orig_argv[1:]
    assert environment == {**os.environ, allocator.VARIABLE: allocator.SETTINGS}


@_GLIBC
def test_a_system_that_refuses(started, monkeypatch):
    def refuses(*call):
        raise PermissionError("not here")

    monkeypatch.setattr(os, "execve", refuses)
    assert allocator.settle() is None
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    allocator.settle()
    assert not started
