"""Hugging Face to Orbax and back is the identity, bit for bit; so is what the manifest says about it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from aspire_jax import checkpoint
from aspire_jax.errors import InputError
from convert import convert, to_hf
from convert.__main__ import main
from tests.fixtures import cases, gguf_files

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def _same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and value.shape == second[name].shape, name
        assert value.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("case", list(cases.CASES))
def test_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Tied and untied, biases and none, every family; dtypes in turn."""
    dtype = list(DTYPES)[list(cases.CASES).index(case) % 3]
    hf = cases.write_folder(tmp_path / "hf", case, dtype=DTYPES[dtype], shards=1 + len(case) % 3)
    assert convert(hf, tmp_path / "orbax").dtype == dtype
    manifest = to_hf(tmp_path / "orbax", tmp_path / "back")
    assert (manifest.dtype, manifest.target, manifest.kind) == (dtype, "huggingface", "orbax")
    original: dict[str, np.ndarray] = {}
    for file in hf.glob("*.safetensors"):
        original |= load_file(file)
    _same(original, load_file(tmp_path / "back" / "model.safetensors"))
    assert (hf / "tokenizer.json").read_bytes() == (tmp_path / "back" / "tokenizer.json").read_bytes()
    convert(tmp_path / "back", tmp_path / "again")
    assert checkpoint.load_config(tmp_path / "again") == checkpoint.load_config(tmp_path / "orbax")


def test_shards(tmp_path: Path) -> None:
    hf = cases.write_folder(tmp_path / "hf", "qwen3-yarn", dtype=np.float16)
    convert(hf, tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "back", shard_bytes=20_000)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 24_000 for file in files)
    back: dict[str, np.ndarray] = {}
    for file in files:
        back |= load_file(file)
        with safe_open(file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
    _same(load_file(hf / "model.safetensors"), back)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == back.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in back.values())
    convert(tmp_path / "back", tmp_path / "again")


def test_a_redundant_tied_output_is_accepted(tmp_path: Path) -> None:
    tensors = cases.weights("qwen2-default-tied")
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    convert(cases.write_folder(tmp_path / "hf", "qwen2-default-tied", tensors=both), tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "back")
    _same(tensors, load_file(tmp_path / "back" / "model.safetensors"))


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    tensors = cases.weights("llama-default-tied")
    old = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    convert(cases.write_folder(tmp_path / "hf", "llama-default-tied", tensors=old), tmp_path / "orbax")


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_dtype(dtype: str, tmp_path: Path) -> None:
    hf = cases.write_folder(tmp_path / "hf", "llama-bias")
    assert convert(hf, tmp_path / "orbax", dtype=dtype).dtype == dtype
    params = checkpoint.load_params(tmp_path / "orbax")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
    to_hf(tmp_path / "orbax", tmp_path / "back")
    expected = {name: value.astype(DTYPES[dtype]) for name, value in load_file(hf / "model.safetensors").items()}
    _same(expected, load_file(tmp_path / "back" / "model.safetensors"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == dtype


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dtype: 'int8', expected one of"):
        convert(tmp_path, tmp_path / "out", dtype="int8")


def test_gguf_to_hf(tmp_path: Path) -> None:
    """What came in as GGUF leaves as a Hugging Face folder in the published row order."""
    convert(gguf_files.write_gguf(tmp_path / "m.gguf", "llama-linear"), tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "back")
    _same(cases.weights("llama-linear"), load_file(tmp_path / "back" / "model.safetensors"))


def test_biases_that_a_config_cannot_describe_are_refused(tmp_path: Path) -> None:
    tensors = gguf_files.gguf_tensors("llama-bias")
    tensors = {name: value for name, value in tensors.items() if "attn_output.bias" not in name}
    convert(gguf_files.write_gguf(tmp_path / "m.gguf", "llama-bias", tensors=tensors), tmp_path / "orbax")
    with pytest.raises(InputError, match="biases that a llama"):
        to_hf(tmp_path / "orbax", tmp_path / "back")


def test_manifest(tmp_path: Path) -> None:
    hf = cases.write_folder(tmp_path / "hf", "mistral-yarn", shards=2)
    manifest = convert(hf, tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert stored == json.loads(manifest.to_json())
    assert (stored["source"], stored["kind"], stored["family"]) == ("hf", "huggingface", "mistral")
    assert stored["parameters"] == sum(value.size for value in cases.weights("mistral-yarn").values())
    assert stored["tensors"] == len(cases.weights("mistral-yarn"))
    assert {"python", "jax", "orbax-checkpoint", "numpy"} <= stored["versions"].keys()
    names = [entry["name"] for entry in stored["files"]]
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"} < set(names)
    assert "model-00002-of-00002.safetensors" in names and len(names) == len(set(names))
    for entry in stored["files"]:
        raw = (hf / entry["name"]).read_bytes()
        assert (entry["size"], entry["sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert str(tmp_path) not in json.dumps(stored)


def test_conversion_is_deterministic(tmp_path: Path) -> None:
    hf = cases.write_folder(tmp_path / "hf", "qwen3-bias")
    for name in ("a", "b"):
        convert(hf, tmp_path / name)
    files = [p.relative_to(tmp_path / "a") for p in sorted((tmp_path / "a").rglob("*")) if p.is_file()]
    assert files == [p.relative_to(tmp_path / "b") for p in sorted((tmp_path / "b").rglob("*")) if p.is_file()]
    for file in files:
        if file.name not in ("_CHECKPOINT_METADATA", "commit_success.txt"):  # a time, a temporary name
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_the_folder_has_ordinary_permissions(tmp_path: Path) -> None:
    convert(cases.write_folder(tmp_path / "hf", "qwen3-bias"), tmp_path / "new" / "out")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "new" / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_command_line(tmp_path: Path, capsys: Any) -> None:
    hf = cases.write_folder(tmp_path / "hf", "qwen3-bias")
    out = tmp_path / "out"
    assert main([str(hf), str(out), "--dtype", "bfloat16", "--json", str(tmp_path / "m.json")]) == 0
    text, progress = capsys.readouterr()
    assert text.startswith(f"{out}: qwen3, ") and text.endswith("parameters, bfloat16\n")
    assert "weights: " in progress and "\r" not in progress  # plain lines, since this is no terminal
    assert json.loads((tmp_path / "m.json").read_text()) == json.loads((out / "manifest.json").read_text())
    assert main([str(out), str(tmp_path / "back"), "--to", "hf", "--json", "-"]) == 0
    text, progress = capsys.readouterr()
    assert json.loads(text)["target"] == "huggingface" and progress == ""


def test_module_and_light_import(tmp_path: Path) -> None:
    """`python -m convert` runs, and its help does not wait for jax, torch or transformers."""
    code = (
        "import sys, convert.__main__ as m\nprint([n for n in ('orbax', 'torch', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "[]\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "convert", str(tmp_path / "none"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
