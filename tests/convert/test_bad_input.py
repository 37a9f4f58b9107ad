"""Bad input through the command line: exit code 2, one line that names file and tensor, nothing left behind."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy

from aspire_jax import checkpoint
from aspire_jax.checkpoint import Writer
from convert.__main__ import main
from tests.fixtures import cases, gguf_files

CASE = "qwen2-linear"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return cases.write_folder(tmp_path / "hf", CASE)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return cases.write_folder(tmp_path / "hf", CASE, shards=3)


def fails(capsys: pytest.CaptureFixture[str], src: Path, *expected: str, args: tuple[str, ...] = ()) -> None:
    """Converting `src` fails as bad input must."""
    dst = src.parent / "out"
    before = sorted(src.parent.iterdir())
    assert main([str(src), str(dst), "--quiet", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for part in expected:
        assert part in err, err
    assert sorted(src.parent.iterdir()) == before, "something was left behind"


def rewrite(hf: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Applies `change` to the tensors of the folder."""
    file = hf / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


def edit_header(hf: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Applies `change` to the table of the file, leaving its data."""
    file = hf / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    new = (text if isinstance(text, str) else json.dumps(header)).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


Q = "model.layers.1.self_attn.q_proj.weight"


def test_missing_tensor(hf: Path, capsys: Any) -> None:
    rewrite(hf, lambda t: t.pop(Q))
    fails(capsys, hf, str(hf), f"tensor {Q} is missing, expected shape [32, 32]")


def test_unknown_tensor(hf: Path, capsys: Any) -> None:
    rewrite(hf, lambda t: t.update({"model.layers.0.extra.weight": np.zeros(3, np.float32)}))
    fails(capsys, hf, "model.safetensors", "tensor model.layers.0.extra.weight is unknown")


def test_tensor_of_a_layer_beyond_the_last(hf: Path, capsys: Any) -> None:
    rewrite(hf, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.zeros((40, 32), np.float32)}))
    fails(capsys, hf, "tensor model.layers.2.mlp.up_proj.weight is unknown")


def test_wrong_shape(hf: Path, capsys: Any) -> None:
    rewrite(hf, lambda t: t.update({Q: np.zeros((32, 31), np.float32)}))
    fails(capsys, hf, "model.safetensors", f"tensor {Q} has shape [32, 31], expected [32, 32]")


def test_unsupported_dtype(hf: Path, capsys: Any) -> None:
    rewrite(hf, lambda t: t.update({Q: t[Q].astype(np.int8)}))
    fails(capsys, hf, f"tensor {Q} has dtype I8, expected F32, F16 or BF16")


def test_overflow_of_float16(hf: Path, capsys: Any) -> None:
    rewrite(hf, lambda t: t.update({Q: t[Q] + 1e6}))
    fails(capsys, hf, f"tensor {Q}: a value lies outside float16", args=("--dtype", "float16"))


def test_truncated_data(hf: Path, capsys: Any) -> None:
    file = hf / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    fails(capsys, hf, "model.safetensors", "file truncated")


@pytest.mark.parametrize("keep", [0, 5, 8, 100])
def test_truncated_header(keep: int, hf: Path, capsys: Any) -> None:
    file = hf / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    fails(capsys, hf, "model.safetensors", "truncated or corrupt")


def test_bytes_after_the_last_tensor(hf: Path, capsys: Any) -> None:
    file = hf / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    fails(capsys, hf, "1 bytes after the last tensor")


@pytest.mark.parametrize(
    "text", ["{nope", "[1]", '{"a": 3}', '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}']
)
def test_corrupt_header(text: str, hf: Path, capsys: Any) -> None:
    edit_header(hf, lambda _: text)
    fails(capsys, hf, "model.safetensors", "corrupt")


def test_duplicate_tensor_in_one_file(hf: Path, capsys: Any) -> None:
    edit_header(hf, lambda h: json.dumps(h)[:-1] + f', "{Q}": {json.dumps(h[Q])}}}')
    fails(capsys, hf, f"tensor {Q} appears twice")


def test_overlapping_tensors(hf: Path, capsys: Any) -> None:
    def change(header: dict[str, Any]) -> None:
        header[Q]["data_offsets"] = header["model.layers.0.self_attn.q_proj.weight"]["data_offsets"]

    edit_header(hf, change)
    fails(capsys, hf, "gap or overlap")


def test_offsets_that_contradict_the_shape(hf: Path, capsys: Any) -> None:
    edit_header(hf, lambda h: h[Q].update(shape=[32, 64]))
    fails(capsys, hf, f"tensor {Q}", "corrupt header")


def test_tied_output_that_differs(tmp_path: Path, capsys: Any) -> None:
    tensors = cases.weights("qwen2-default-tied")
    table = tensors["model.embed_tokens.weight"]
    hf = cases.write_folder(tmp_path / "hf", "qwen2-default-tied", tensors={**tensors, "lm_head.weight": table + 1})
    fails(capsys, hf, "tensor lm_head.weight differs from model.embed_tokens.weight")


def test_missing_shard(sharded: Path, capsys: Any) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    fails(capsys, sharded, INDEX, "shard model-00002-of-00003.safetensors is missing")


def _index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_index_names_a_tensor_its_shard_lacks(sharded: Path, capsys: Any) -> None:
    _index(sharded, lambda i: i["weight_map"].update({"model.ghost": "model-00001-of-00003.safetensors"}))
    fails(capsys, sharded, INDEX, "tensor model.ghost is missing in shard model-00001-of-00003.safetensors")


def test_index_names_the_wrong_shard(sharded: Path, capsys: Any) -> None:
    def change(index: dict[str, Any]) -> None:
        here = index["weight_map"][Q]
        index["weight_map"][Q] = next(v for v in index["weight_map"].values() if v != here)

    _index(sharded, change)
    fails(capsys, sharded, INDEX, f"tensor {Q} lies in", "the index says")


def test_index_lacks_a_tensor(sharded: Path, capsys: Any) -> None:
    _index(sharded, lambda i: i["weight_map"].pop(Q))
    fails(capsys, sharded, INDEX, f"tensor {Q} lies in", "the index says no file")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_index_of_the_wrong_form(weight_map: Any, sharded: Path, capsys: Any) -> None:
    _index(sharded, lambda i: i.update(weight_map=weight_map))
    fails(capsys, sharded, INDEX, "weight_map")


def test_index_that_leaves_the_folder(sharded: Path, capsys: Any) -> None:
    _index(sharded, lambda i: i["weight_map"].update({Q: "../hf/model-00001-of-00003.safetensors"}))
    fails(capsys, sharded, INDEX, "is missing")


def test_one_tensor_in_two_shards(sharded: Path, capsys: Any) -> None:
    names = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(set(names.values())) if file != names[Q])
    tensors = safetensors.numpy.load_file(sharded / other)
    tensors[Q] = safetensors.numpy.load_file(sharded / names[Q])[Q]
    safetensors.numpy.save_file(tensors, sharded / other)
    fails(capsys, sharded, f"tensor {Q}")


def test_no_weights(hf: Path, capsys: Any) -> None:
    (hf / "model.safetensors").unlink()
    fails(capsys, hf, "no weights, expected model.safetensors")


def test_shards_without_an_index(sharded: Path, capsys: Any) -> None:
    (sharded / INDEX).unlink()
    fails(capsys, sharded, f"3 safetensors files, expected {INDEX}")


def test_no_tokenizer(hf: Path, capsys: Any) -> None:
    (hf / "tokenizer.json").unlink()
    fails(capsys, hf, "no tokenizer.json")
    assert main([str(hf), str(hf.parent / "out"), "--quiet", "--no-tokenizer"]) == 0


def test_damaged_tokenizer(hf: Path, capsys: Any) -> None:
    (hf / "tokenizer.json").write_text("{}")
    fails(capsys, hf, "tokenizer.json")


def test_damaged_config(hf: Path, capsys: Any) -> None:
    (hf / "config.json").write_text("{")
    fails(capsys, hf, "config.json")


def test_source_does_not_exist(tmp_path: Path, capsys: Any) -> None:
    fails(capsys, tmp_path / "nothing", "nothing: no such file or folder")


def test_destination_exists(hf: Path, capsys: Any) -> None:
    (hf.parent / "out").mkdir()
    fails(capsys, hf, "out: exists")


def test_destination_is_the_source_or_above_it(hf: Path, capsys: Any) -> None:
    for dst in (hf, hf.parent):
        assert main([str(hf), str(dst), "--quiet"]) == 2
        assert f"{dst}: exists" in capsys.readouterr().err
    assert (hf / "model.safetensors").is_file()


def test_parents_made_for_nothing_are_removed(hf: Path, capsys: Any) -> None:
    (hf / "config.json").write_text("{")
    assert main([str(hf), str(hf.parent / "a" / "b" / "out"), "--quiet"]) == 2
    assert not (hf.parent / "a").exists()


def test_gguf_truncations_and_noise(tmp_path: Path, capsys: Any) -> None:
    """Whatever is cut off or overwritten, the answer is one line; never a traceback, a hang or a folder."""
    path = gguf_files.write_gguf(tmp_path / "m.gguf", CASE)
    whole = path.read_bytes()
    data = len(whole) - sum(value.nbytes for value in gguf_files.gguf_tensors(CASE).values())
    for keep in (4, 7, 12, 24, 40, 100, *range(200, data, 997), len(whole) - 1):
        path.write_bytes(whole[:keep])
        fails(capsys, path, "m.gguf")
    rng = np.random.default_rng(0)
    for _ in range(60):  # a corrupt length or count anywhere in the table
        raw = bytearray(whole)
        at = int(rng.integers(8, data - 8))
        raw[at : at + 8] = b"\xff" * 8
        path.write_bytes(raw)
        dst = tmp_path / "out"
        code = main([str(path), str(dst), "--quiet"])
        err = capsys.readouterr().err
        assert code == 0 or (code == 2 and err.count("\n") == 1 and "m.gguf" in err), (at, err)
        if code == 0:  # the bytes were a name, a token or a number of no consequence
            __import__("shutil").rmtree(dst)
        assert sorted(tmp_path.iterdir()) == [path]


def test_gguf_of_another_kind(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    fails(capsys, path, "begins with b'GGML', expected b'GGUF'")
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    fails(capsys, path, "GGUF version 1")
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    fails(capsys, path, "big-endian GGUF")


def _metadata(**fields: Any) -> Callable[[gguf.GGUFWriter], None]:
    """Sets fields of the file; "__" stands for a dot."""

    def more(writer: gguf.GGUFWriter) -> None:
        for name, value in fields.items():
            key = name.replace("__", ".")
            for table in writer.kv_data:
                table.pop(key, None)
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif value is not None:
                writer.add_array(key, value)

    return more


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"general__architecture": "gemma"}, "general.architecture is 'gemma', expected one of llama, qwen2, qwen3"),
        ({"qwen2__block_count": None}, "field qwen2.block_count is missing"),
        ({"qwen2__block_count": 3}, "tensor blk.2.attn_norm.weight is missing"),
        ({"qwen2__expert_count": 4}, "a mixture of experts is not supported"),
        ({"qwen2__rope__dimension_count": 4}, "qwen2.rope.dimension_count is 4"),
        ({"qwen2__attention__sliding_window": 16}, "sliding_window is 16"),
        ({"qwen2__rope__scaling__type": "longrope"}, "qwen2.rope.scaling.type is 'longrope'"),
        ({"qwen2__attention__layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is 0.0"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model is 'bert', expected gpt2 or llama"),
        ({"tokenizer__ggml__model": None}, "field tokenizer.ggml.model is missing"),
        ({"split__count": 3}, "split.count is 3, expected a GGUF in one file"),
        ({"qwen2__attention__head_count_kv": [2, 2]}, "qwen2.attention.head_count_kv is [2, 2]"),
        ({"tokenizer__ggml__pre": None}, "field tokenizer.ggml.pre is missing"),
        ({"tokenizer__ggml__pre": "strange"}, "tokenizer.ggml.pre is 'strange'"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer__ggml__tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"tokenizer__ggml__merges": ["h e x"]}, "tokenizer.ggml.merges has 'h e x'"),
        ({"tokenizer__ggml__merges": ["h zzz"]}, "m.gguf: tokenizer:"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "tokenizer.ggml.token_type is not a number per token"),
        ({"tokenizer__ggml__bos_token_id": 9999}, "tokenizer.ggml.bos_token_id is 9999"),
    ],
)
def test_gguf_metadata(fields: dict[str, Any], expected: str, tmp_path: Path, capsys: Any) -> None:
    path = gguf_files.write_gguf(tmp_path / "m.gguf", CASE, more=_metadata(**fields))
    fails(capsys, path, "m.gguf", expected)


def test_gguf_tensors(tmp_path: Path, capsys: Any) -> None:
    tensors = gguf_files.gguf_tensors(CASE)
    path = tmp_path / "m.gguf"
    gguf_files.write_gguf(path, CASE, tensors={**tensors, "blk.0.ffn_up.scale": np.zeros(2, np.float32)})
    fails(capsys, path, "tensor blk.0.ffn_up.scale is unknown")
    gguf_files.write_gguf(path, CASE, tensors={**tensors, "blk.0.attn_q.bias": np.zeros(31, np.float32)})
    fails(capsys, path, "tensor blk.0.attn_q.bias has shape [31], expected [32]")
    tensors.pop("token_embd.weight")
    gguf_files.write_gguf(path, CASE, tensors=tensors)
    fails(capsys, path, "tensor token_embd.weight is missing")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("params/embed: RESOURCE_EXHAUSTED: Error writing: No space left on device"),
    ],
)
def test_full_disk(error: OSError, hf: Path, capsys: Any, monkeypatch: Any) -> None:
    def write(self: Writer, name: str, layer: int | None, value: np.ndarray) -> None:
        if layer == 1:
            raise error

    monkeypatch.setattr(checkpoint.Writer, "write", write)
    fails(capsys, hf, "out", "disk full")


def test_interrupted(hf: Path, capsys: Any, monkeypatch: Any) -> None:
    def write(self: Writer, name: str, layer: int | None, value: np.ndarray) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.Writer, "write", write)
    assert main([str(hf), str(hf.parent / "out"), "--quiet"]) == 130
    assert sorted(hf.parent.iterdir()) == [hf]


def test_usage_error_is_code_2(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["only-one"])
    assert caught.value.code == 2


def test_exporting_what_is_no_converted_folder(hf: Path, capsys: Any) -> None:
    fails(capsys, hf, "no model.json there", args=("--to", "hf"))
