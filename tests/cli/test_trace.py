"""`aspire trace`, and `aspire generate --method oracle` with what it wrote."""

from __future__ import annotations

import json

import pytest

from aspire_jax import tracing
from tests.cli.files import prompts, read_lines

SMALL = ("--slots", 2, "--max-tokens", 24)
POLICY = ("--policy", "k_min=2", "--policy", "recent=1", "--policy", "rho=0")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return prompts(tmp_path_factory.mktemp("in") / "in.jsonl", 3)


def test_record_and_replay(aspire, folder, loaded, source, tmp_path):
    file = tmp_path / "t.npz"
    command = ("trace", "-m", folder, "-i", source, "-o", file, "--d-max", 3, *SMALL, *POLICY)
    done = aspire(*command, "--json", tmp_path / "t.json")
    assert done.code == 0, done.err
    trace = tracing.load(file)
    assert f"{file}: 3 requests, {len(trace.request)} draft starts" in done.out
    assert trace.ids.tolist() == ["p0", "p1", "p2"] and trace.meta["method"] == "aspire" and trace.d_max == 3
    figures = json.loads((tmp_path / "t.json").read_text())
    assert figures["starts"] == len(trace.request) and figures["out"] == str(file)
    done = aspire(*command)
    assert (done.code, done.err) == (2, f"aspire: error: --out: {file} exists, expected another name or --overwrite\n")
    out = tmp_path / "out.jsonl"
    done = aspire("generate", "-m", folder, "-i", source, "-o", out, "--method", "oracle", "--trace", file, *SMALL)
    assert done.code == 0, done.err
    for i, line in enumerate(read_lines(out)):
        assert line["token_ids"] == trace.tokens[i, : trace.emitted[i]].tolist()
        assert line["stats"]["drafted"] == line["stats"]["accepted"] == trace.accepted[trace.request == i].sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--method", "autoregressive"),
            "--method autoregressive: method: NoContext selects no context",
        ),
        (("--d-max", 33), "--method aspire: d_max: 33, expected 1 to 32"),
        (("--policy", "positions=3"), "--policy positions: method aspire has no such option"),
        (
            ("--out", "no/such/t.npz"),
            "argument --out/-o: 'no/such/t.npz', expected a file name in a folder that exists",
        ),
        (("--out", "SOURCE"), "--out: SOURCE, expected another file than --input"),
    ],
)
def test_refused(aspire, folder, loaded, source, tmp_path, arguments, message):
    arguments = [str(source) if a == "SOURCE" else a for a in arguments]
    done = aspire("trace", "-m", folder, "-i", source, "-o", tmp_path / "t.npz", *SMALL, "-q", *arguments)
    assert done.code == 2 and done.err.startswith(f"aspire: error: {message.replace('SOURCE', str(source))}"), done.err
    assert done.err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "oracle"), "--trace: missing, expected a file that aspire trace wrote"),
        (("--trace", "x.npz"), "--trace: expected --method oracle"),
        (("--method", "oracle", "--trace", "none.npz"), "none.npz: No such file or directory, expected a trace (npz)"),
        (("--method", "oracle", "--trace", "OUT"), "--trace: OUT, expected another file than --output"),
        (
            ("--method", "oracle", "--trace", "x", "--policy", "positions=3"),
            "--policy positions: method oracle has",
        ),
    ],
)
def test_generate_refuses(aspire, folder, loaded, source, tmp_path, arguments, message):
    out = tmp_path / "out.jsonl"
    arguments = [str(out) if a == "OUT" else a for a in arguments]
    done = aspire("generate", "-m", folder, "-i", source, "-o", out, *SMALL, *arguments)
    assert done.code == 2 and done.err.startswith(f"aspire: error: {message.replace('OUT', str(out))}"), done.err
    assert not out.exists()
