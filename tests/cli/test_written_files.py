"""A file that a command would write at its end is refused at its beginning where it could not be written."""

from __future__ import annotations

import os

import pytest

OPTIONS = [
    (("generate", "-m", "M", "-p", "x"), "--json"),
    (("generate", "-m", "M", "-p", "x"), "--calibration"),
    (("generate", "-m", "M", "-i", "I"), "--output"),
    (("trace", "-m", "M", "-i", "I"), "--out"),
    (("trace", "-m", "M", "-i", "I", "-o", "O"), "--json"),
    (("demo",), "--json"),
    (("info", "M"), "--json"),
    (("convert", "S", "D"), "--json"),
]


@pytest.mark.parametrize(("command", "option"), OPTIONS)
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("", "a file name in a folder that exists"),
        (".", "a file name in a folder that exists"),
        ("no/such", "a file name in a folder that exists"),
        ("file/below", "a file name in a folder that exists"),
        ("pipe", "a file, not a device or a pipe"),
        ("/dev/null", "a file, not a device or a pipe"),
        ("x" * 300, "a file"),
    ],
)
def test_refused(aspire, tmp_path, monkeypatch, command, option, file, expected):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "file").touch()
    done = aspire(*command, option, file)
    assert done.code == 2 and done.err.count("\n") == 1
    assert f"argument {option}" in done.err and f", expected {expected}" in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "pipe"]


def test_more_than_anything_counts(aspire):
    assert "argument --batch: '2147483648', expected at most 2147483647" in aspire("info", "M", "--batch", 2**31).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--top-p", "nan"), "--top-p: NaN, expected a number above 0"),
        (("--repetition-penalty", "0"), "--repetition-penalty: 0.0, expected a number"),
        (("--n", "0"), "--n: 0, expected a whole number"),
        (("--stop", ""), '--stop: [""], expected a string'),
        (("--max-length", "1"), "--max-length: 1, expected 2 to"),
    ],
)
def test_what_holds_for_all_prompts_is_refused_as_an_option(aspire, folder, loaded, tmp_path, arguments, message):
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "prompt": "x"}\n')
    for given in (("-p", "x"), ("-i", source, "-o", tmp_path / "out")):
        done = aspire("generate", "-m", folder, *given, *arguments)
        assert done.code == 2 and done.err.startswith(f"aspire: error: {message}") and done.err.count("\n") == 1
