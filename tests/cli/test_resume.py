"""An interrupted run goes on where it was: nothing lost, nothing twice, at whatever point it was stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from aspire_jax.cli.journal import Journal
from tests.cli.files import SMALL, prompts, read_lines, write_lines


@pytest.fixture
def command(folder, tmp_path):
    source = prompts(tmp_path / "in.jsonl", 9)
    return ("generate", "-m", folder, "-i", source, "-o", tmp_path / "out.jsonl", *SMALL)


@pytest.fixture
def whole(aspire, loaded, command, tmp_path):
    """The output and the partial file of a run that nobody interrupted (the latter as it was just before the end)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "finish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert aspire(*command).code == 130
    partial = (tmp_path / "out.jsonl.partial").read_bytes()
    assert aspire(*command, "--resume").code == 0
    output = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    return output, partial


def same(path, expected: bytes) -> bool:
    """Equal but for the statistics, which depend on who was beside whom."""

    def strip(lines):
        return [{k: v for k, v in line.items() if k != "stats"} for line in lines]

    return strip(read_lines(path)) == strip(json.loads(line) for line in expected.splitlines())


def test_one_line_for_every_reader(tmp_path):
    """JSON allows a few characters in a string that str.splitlines and its like take for the end of a line."""
    line = {"id": "a", "choice": 0, "text": "".join(map(chr, range(0xD800))) + "\u2028 \U0001f600"}
    with Journal(tmp_path / "out.jsonl", [("a", 0)], {}) as journal:
        journal.add(line)
        journal.finish()
    assert [json.loads(text) for text in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()] == [line]


def test_a_partial_file_cut_anywhere(aspire, command, whole, tmp_path):
    expected, partial = whole
    rng = random.Random(1)
    cuts = [0, 1, len(partial) - 1, len(partial), *(rng.randrange(len(partial)) for _ in range(16))]
    for cut in cuts:
        (tmp_path / "out.jsonl.partial").write_bytes(partial[:cut])
        done = aspire(*command, "--resume")
        assert done.code == 0, done.err
        assert same(tmp_path / "out.jsonl", expected), cut
        kept = max(0, partial[:cut].count(b"\n") - 1)
        assert (f"({kept} from the interrupted run)" in done.out) == (kept > 0)
        (tmp_path / "out.jsonl").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_interrupted_again_and_again(aspire, command, whole, tmp_path, monkeypatch):
    expected, _ = whole
    add, rng, rounds = Journal.add, random.Random(2), 0
    while not (tmp_path / "out.jsonl").exists():
        left = rng.randrange(1, 4)

        def add_or_stop(self, line):
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            add(self, line)

        monkeypatch.setattr(Journal, "add", add_or_stop)
        done = aspire(*command, *(["--resume"] if rounds else []))
        assert done.code in (0, 130) and "Traceback" not in done.err
        if done.code == 130:
            assert "aspire: interrupted, " in done.err and "--resume goes on" in done.err
        rounds += 1
    assert rounds > 3 and same(tmp_path / "out.jsonl", expected)


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_killed(aspire, loaded, folder, tmp_path, kill):
    source = prompts(tmp_path / "in.jsonl", 250)
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "-m", folder, "-i", source, "-o", output, "--method", "autoregressive", *SMALL[:4])
    command = [sys.executable, "-m", "aspire_jax", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    partial = output.with_name("out.jsonl.partial")
    deadline = time.monotonic() + 300
    while not (partial.exists() and partial.read_bytes().count(b"\n") > 5):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)
    process.send_signal(kill)
    _, err = process.communicate(timeout=300)
    assert process.returncode == (-kill if kill == signal.SIGKILL else 130), err
    assert "Traceback" not in err and not output.exists()
    kept = partial.read_bytes().count(b"\n") - 1
    assert 5 <= kept < 250
    done = aspire(*arguments, "--resume")
    assert done.code == 0 and f"({kept} from the interrupted run)" in done.out
    assert [line["id"] for line in read_lines(output)] == [f"p{i}" for i in range(250)]


def test_what_is_there_is_not_destroyed(aspire, command, whole, tmp_path):
    expected, partial = whole
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    assert f"{output}: exists, expected --overwrite or another name" in aspire(*command).err
    assert "exists and is not this input's output" in aspire(*command, "--resume").err
    assert output.read_text() == "precious"
    assert aspire(*command, "--overwrite").code == 0 and same(output, expected)
    done = aspire(*command, "--resume")
    assert done.code == 0 and "complete (an answer to every id), nothing to do" in done.out
    output.unlink()
    (tmp_path / "out.jsonl.partial").write_bytes(partial)
    done = aspire(*command)
    assert done.code == 2 and "of an interrupted run, expected --resume or --overwrite" in done.err
    assert (tmp_path / "out.jsonl.partial").read_bytes() == partial


def test_another_runs_lines_are_not_mixed_in(aspire, command, whole, folder, tmp_path):
    _, partial = whole
    journal = tmp_path / "out.jsonl.partial"
    journal.write_bytes(partial)
    for change, message in (
        (("--max-tokens", "41"), "max_tokens: 41, expected 40 as in the interrupted run"),
        (("--method", "autoregressive"), "method"),
        (("--reproducible",), "reproducible: true, expected false as in the interrupted run"),
        (("--policy", "rho=0.5"), "options"),
        (("--stop", "x"), 'stop: ["x"], expected [] as'),
        (("--temperature", "0.5"), "temperature: 0.5, expected null as"),
    ):
        other = [a for a in command if "=" not in str(a) and a != "--policy"] if change[0] == "--method" else command
        done = aspire(*other, *change, "--resume")
        assert done.code == 2 and message in done.err, done.err
    lines = read_lines(tmp_path / "in.jsonl")
    write_lines(tmp_path / "in.jsonl", *lines[:-1], {**lines[-1], "prompt": "other"})
    assert "out.jsonl.partial: input: " in aspire(*command, "--resume").err
    assert journal.read_bytes() == partial


def test_a_damaged_partial_file_is_named(aspire, command, whole, tmp_path):
    _, partial = whole
    journal = tmp_path / "out.jsonl.partial"
    lines = partial.split(b"\n")
    journal.write_bytes(b"\n".join([lines[0], b"garbage", *lines[2:]]))
    assert "out.jsonl.partial:2: not JSON" in aspire(*command, "--resume").err
    journal.write_bytes(b"\n".join([lines[0], b'{"id": "p0", "choice": 1}', b""]))
    assert "partial:2: choice: 1, expected one that was asked for" in aspire(*command, "--resume").err
    journal.write_bytes(b"\n".join([lines[0], b'{"id": ["p0"]}', b""]))
    assert 'partial:2: id: ["p0"], expected one of the input\'s' in aspire(*command, "--resume").err
    journal.write_bytes(b'{"id": "p0"}\n')
    assert "not the first line of an interrupted run" in aspire(*command, "--resume").err


def test_two_at_a_time_are_refused(aspire, loaded, command, tmp_path):
    with Journal(tmp_path / "out.jsonl", [], {}):
        done = aspire(*command, "--overwrite")
    assert done.code == 2 and "another process writes it" in done.err


def test_output_where_none_can_be(aspire, loaded, command, tmp_path):
    command = list(command)
    at = command.index("-o") + 1
    command[at] = tmp_path / "no" / "out.jsonl"
    assert "expected a file name in a folder that exists" in aspire(*command).err
    command[at] = tmp_path
    assert "expected a file name in a folder that exists" in aspire(*command).err


def test_a_sampled_run_goes_on_with_its_own_seed(aspire, loaded, command, tmp_path, monkeypatch):
    """Two answers to each prompt, and no seed chosen: what is left is drawn as it would have been."""
    command = (*command, "--temperature", "0.9", "--n", "2")
    done = aspire(*command)
    seed = int(done.out.rpartition("seed ")[2])
    lines = read_lines(tmp_path / "out.jsonl")
    assert [(line["id"], line["choice"]) for line in lines] == [(f"p{i}", c) for i in range(9) for c in (0, 1)]
    assert [line["seed"] for line in lines] == list(range(seed, seed + 18))
    assert len({line["text"] for line in lines}) > 9
    expected = (tmp_path / "out.jsonl").read_bytes()
    assert aspire(*command, "--overwrite", "--seed", seed).code == 0 and same(tmp_path / "out.jsonl", expected)
    (tmp_path / "out.jsonl").unlink()
    with monkeypatch.context() as patch:
        add = Journal.add

        def add_or_stop(self, line):
            if len(self.done) == 5:
                raise KeyboardInterrupt
            add(self, line)

        patch.setattr(Journal, "add", add_or_stop)
        assert aspire(*command).code == 130
    partial = read_lines(tmp_path / "out.jsonl.partial")
    seed = partial[0]["aspire_run"]["seed"]
    assert aspire(*command, "--resume").code == 0
    lines = read_lines(tmp_path / "out.jsonl")
    assert [line["seed"] for line in lines] == list(range(seed, seed + 18)) and lines[:5] == partial[1:]
    expected = (tmp_path / "out.jsonl").read_bytes()
    assert aspire(*command, "--overwrite", "--seed", seed).code == 0 and same(tmp_path / "out.jsonl", expected)
