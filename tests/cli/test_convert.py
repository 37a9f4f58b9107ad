"""`aspire convert` is `python -m convert`; what it writes, the other commands read."""

from __future__ import annotations

import json

from tests.fixtures import cases


def test_converts_and_refuses(aspire, tmp_path):
    source, target = cases.write_folder(tmp_path / "hf", "qwen3-default-tied"), tmp_path / "model"
    done = aspire("convert", source, target, "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    before = json.loads(aspire("info", source, "--json", "-").out)
    after = json.loads(aspire("info", target, "--json", "-").out)
    assert {**before, "model": ""} == {**after, "model": ""}
    done = aspire("convert", source, target)
    assert done.code == 2 and "exists" in done.err and done.err.count("\n") == 1
    done = aspire("generate", "-m", source, "-p", "text")
    assert done.code == 2 and f"run `aspire convert {source} DST` first" in done.err
