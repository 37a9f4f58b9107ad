"""Whatever stands in an input file: it is decoded, or refused in one line that names it, and nothing is written."""

from __future__ import annotations

import json
import random

import pytest

from tests.cli.files import SMALL, prompts

GOOD = {"id": "a", "prompt": "hello"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "no lines, expected at least one prompt"),
        (b"{", "1: not JSON"),
        (b"[1, 2]", "1: a JSON list, expected an object"),
        (b"null", "1: a JSON NoneType, expected an object"),
        (b'{"id": "a"}', "1: no prompt, expected one of prompt, messages, token_ids"),
        (b'{"prompt": "a"}', "1: id: missing, expected a string or a whole number"),
        (
            b'{"id": null, "prompt": "a"}\n{"id": null, "prompt": "b"}',
            "1: id: null, expected a string or a whole number",
        ),
        (b'{"id": 1.5, "prompt": "a"}', "1: id: 1.5, expected a string or a whole number"),
        (b'{"id": ["a"], "prompt": "a"}', '1: id: ["a"], expected'),
        (b'{"id": "a", "prompt": 5}', "1: prompt: 5, expected text, not empty"),
        (b'{"id": "a", "prompt": ""}', '1: prompt: "", expected text, not empty'),
        (b'{"id": "\\ud800", "prompt": "x"}', '1: id: "\\ud800", expected a string or a whole number'),
        (b'{"id": "a", "prompt": "\\ud800"}', '1: prompt: "\\ud800", expected text'),
        (b'{"id": "a", "prompt": "b", "prompt": "c"}', "1: prompt: given twice, expected once"),
        (b'{"id": "a", "prompt": "b", "max_token": 3}', "1: max_token: 3, expected one of the fields"),
        (b'{"id": "a", "prompt": "b", "max_tokens": "3"}', '1: max_tokens: "3", expected a whole number'),
        (b'{"id": "a", "prompt": "b", "max_tokens": NaN}', "1: NaN is not JSON"),
        (b'{"id": "a", "prompt": "b", "temperature": -0.7}', "1: temperature: -0.7, expected a number, 0"),
        (b'{"id": "a", "prompt": "b", "messages": []}', "1: prompt and messages, expected one of"),
        (b'{"id": "a", "messages": []}', "1: messages: [], expected a list"),
        (b'{"id": "a", "messages": [{"role": "user"}]}', "1: messages: "),
        (b'{"id": "a", "token_ids": [1, 999]}', "1: token_ids: [1, 999], expected token ids from 0 to 259"),
        (b'{"id": "a", "prompt": "\xff"}', "1: byte 24 is not UTF-8"),
        (
            b'{"id": "a", "prompt": "' + b"x" * 128 + b'"}',
            "1: prompt: 128 tokens, expected fewer than 128, or truncate",
        ),
        (b'{"id": "a", "prompt": "b"}\n\n{"id": "a", "prompt": "c"}', '3: id: "a", expected an id of its own'),
        (b'{"id": "a", "n": ' + b"9" * 5000 + b"}", "1: not JSON that can be read"),
        (b"[" * 100_000, "1: not JSON that can be read"),
    ],
)
def test_refused(aspire, folder, loaded, tmp_path, line, message):
    source = tmp_path / "in.jsonl"
    source.write_bytes(line)
    done = aspire("generate", "-m", folder, "-i", source, "-o", tmp_path / "out.jsonl", *SMALL)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith(f"aspire: error: {source}:") and done.err.count("\n") == 1 and message in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_one_bad_line_at_the_end_stops_everything(aspire, folder, loaded, tmp_path):
    source = prompts(tmp_path / "in.jsonl")
    with source.open("a") as file:
        file.write('{"id": "last", "prompt": "b", "top_p": "x"}\n')
    done = aspire("generate", "-m", folder, "-i", source, "-o", tmp_path / "out.jsonl", *SMALL)
    assert done.code == 2 and f'{source}:8: top_p: "x", expected a number' in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_damaged_lines_are_decoded_or_refused(aspire, folder, loaded, tmp_path):
    rng = random.Random(5)
    values = [None, True, -1, 0, 2, 1e9, 0.5, "", "x", [], [1], ["x"], {}, {"role": "user", "content": "a"}, "\x00"]
    fields = ["id", "prompt", "messages", "token_ids", "max_tokens", "stop", "stop_token_ids", "ignore_eos"]
    fields += ["truncate", "top_p", "seed", "logit_bias", "n", "other", ""]
    long = {"id": "long", "prompt": "x" * 60, "max_tokens": 40}
    refused = 0
    for number in range(250):
        line = dict(GOOD)
        for _ in range(rng.randrange(1, 3)):
            field = rng.choice(fields)
            if rng.random() < 0.2:
                line.pop(field, None)
            else:
                line[field] = rng.choice(values)
        data = bytearray(json.dumps(line).encode())
        if rng.random() < 0.3:
            data[rng.randrange(len(data))] = rng.randrange(256)
        source, output = tmp_path / "in.jsonl", tmp_path / f"out{number}.jsonl"
        # The other two lines keep the engine the same whatever the damaged one asks for.
        others = [json.dumps(x).encode() for x in (long, {**long, "id": "other"})]
        source.write_bytes(b"\n".join([*others, bytes(data)]))
        done = aspire("generate", "-m", folder, "-i", source, "-o", output, *SMALL, "-q")
        if done.code == 0:
            assert len(output.read_text().splitlines()) >= 2
        else:
            refused += 1
            assert done.code == 2 and done.err.count("\n") == 1, done.err
            assert done.err.startswith(f"aspire: error: {source}:3: ") or b"\n" in data, done.err
            assert not output.exists() and not output.with_name(output.name + ".partial").exists()
    assert 100 < refused < 250
