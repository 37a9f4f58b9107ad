"""GGUF files give the same model as the safetensors they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from aspire_jax import checkpoint
from aspire_jax.config import RopeConfig
from aspire_jax.errors import InputError
from convert import convert, read_config
from convert.gguf_file import read_gguf
from tests.fixtures import cases, gguf_files

# GGUF has no room for these: yarn's mscale, an attention factor of its own, an unrounded ramp.
_SAME = [name for name in cases.CASES if name not in ("llama-yarn-mscale", "qwen3-yarn")]


def _dequantises(kind: Kind) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _leaves(folder: Path) -> dict[str, np.ndarray]:
    params = checkpoint.load_params(folder)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


@pytest.mark.parametrize("case", _SAME)
def test_equals_the_safetensors_route(case: str, tmp_path: Path) -> None:
    convert(cases.write_folder(tmp_path / "hf", case), tmp_path / "a", tokenizer=False)
    convert(gguf_files.write_gguf(tmp_path / "m.gguf", case), tmp_path / "b")
    first, second = _leaves(tmp_path / "a"), _leaves(tmp_path / "b")
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)
    a, b = checkpoint.load_config(tmp_path / "a"), checkpoint.load_config(tmp_path / "b")
    family = "llama" if a.family == "mistral" else a.family
    if a.rope.kind != "llama3":  # of that, only ratios are stored
        assert b.rope == a.rope
    assert (b.family, b.max_length, b.norm_eps, b.eos_ids) == (family, a.max_length, a.norm_eps, a.eos_ids)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_weights_are_what_gguf_dequantises(kind: Kind, tmp_path: Path, monkeypatch: Any) -> None:
    sizes = {**cases.CASES["llama-bias"], "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    monkeypatch.setitem(cases.CASES, "llama-bias", sizes)
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind) if value.ndim > 1 else value
        for name, value in cases.weights("llama-bias").items()
    }
    convert(cases.write_folder(tmp_path / "hf", "llama-bias", tensors=rounded), tmp_path / "a")
    manifest = convert(
        gguf_files.write_gguf(tmp_path / "m.gguf", "llama-bias", kind=kind), tmp_path / "b", dtype="float32"
    )
    assert manifest.kind == "gguf" and manifest.dtype == "float32"
    second = _leaves(tmp_path / "b")
    for name, value in _leaves(tmp_path / "a").items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_the_natural_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    for kind, expected in ((Kind.F16, "float16"), (Kind.BF16, "bfloat16"), (Kind.F32, "float32")):
        path = gguf_files.write_gguf(tmp_path / f"{kind.name}.gguf", "qwen3-linear", kind=kind)
        assert convert(path, tmp_path / kind.name).dtype == expected


def _write_raw(path: Path, kind: Kind, raw: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.zeros(3, np.float32))
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [kind for kind in Kind if _dequantises(kind)], ids=lambda kind: kind.name)
def test_every_type_reads_as_gguf_itself_reads_it(kind: Kind, tmp_path: Path, monkeypatch: Any) -> None:
    """Random bytes are a valid block of every type; block-wise reading must not change what they mean."""
    monkeypatch.setattr("convert.tensors._BLOCK_BYTES", 5000)  # several blocks, the last one short
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, width = 7, 512
    raw = np.random.default_rng(kind.value).integers(0, 256, (rows, width // block * size), dtype=np.uint8)
    tensor = read_gguf(_write_raw(tmp_path / "t.gguf", kind, raw)).tensors["x"]
    assert (tensor.kind, tensor.shape) == (kind.name, (rows, width))
    with np.errstate(all="ignore"):  # random scales overflow
        np.testing.assert_array_equal(tensor.read(np.dtype(np.float32)), gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", [kind for kind in Kind if not _dequantises(kind)], ids=lambda kind: kind.name)
def test_a_type_that_gguf_cannot_dequantise_is_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    path = _write_raw(tmp_path / "t.gguf", kind, np.zeros((2, 512 // block * size), np.uint8))
    with pytest.raises(InputError, match=rf"tensor x has type {kind.name}"):
        read_gguf(path)


def test_metadata_reads_as_gguf_itself_reads_it(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_array("x.floats", [0.5, -1.0])
        writer.add_array("x.words", ["a", "ü", ""])
        writer.add_array("x.flags", [True, False])
        writer.add_int8("x.int8", -3)
        writer.add_uint64("x.uint64", 2**63)
        writer.add_float64("x.float64", 0.1)
        writer.add_bool("x.bool", True)

    path = gguf_files.write_gguf(tmp_path / "m.gguf", "qwen2-yarn", more=more)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.offset, mine.size, mine.shape) == (tensor.data_offset, tensor.n_bytes, tuple(tensor.shape[::-1]))


@pytest.mark.parametrize(
    "rope",
    [
        (8.0, 1.0, 4.0, 8192),  # Llama 3.1
        (32.0, 1.0, 4.0, 8192),  # Llama 3.2
        (16.0, 1.0, 8.0, 4096),
        (4.0, 2.0, 6.0, 2048),
    ],
)
def test_llama3_parameters_are_recovered_from_the_divisors(
    rope: tuple[float, float, float, int], tmp_path: Path, monkeypatch: Any
) -> None:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = {"rope_type": "llama3", **dict(zip(keys, rope, strict=True))}
    monkeypatch.setitem(cases.CASES, "llama-llama3", {**cases.CASES["llama-llama3"], "head_dim": 64})
    cases.CASES["llama-llama3"]["rope_scaling"] = scaling
    found = read_config(gguf_files.write_gguf(tmp_path / "m.gguf", "llama-llama3")).rope
    factor, low, high, original = rope
    assert (found.kind, found.factor) == ("llama3", factor)
    assert found.high_freq_factor / found.low_freq_factor == pytest.approx(high / low, rel=1e-3)
    assert found.original_max_length is not None
    assert found.original_max_length / found.low_freq_factor == pytest.approx(original / low, rel=1e-3)
    if (low, high, original) == (1.0, 4.0, 8192):
        assert found == RopeConfig(
            kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_length=original
        )


def test_divisors_of_no_llama3_rope_are_refused(tmp_path: Path) -> None:
    values = np.linspace(1, 9, 8).astype(np.float32)[::-1].copy()
    path = gguf_files.write_gguf(
        tmp_path / "m.gguf", "llama-default-tied",
        tensors={**gguf_files.gguf_tensors("llama-default-tied"), "rope_freqs.weight": values},
    )  # fmt: skip
    with pytest.raises(InputError, match=r"rope_freqs\.weight"):
        read_config(path)


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    tensors = {**gguf_files.gguf_tensors("llama-default-tied"), "rope_freqs.weight": np.ones(8, np.float32)}
    path = gguf_files.write_gguf(tmp_path / "m.gguf", "llama-default-tied", tensors=tensors)
    assert read_config(path).rope == RopeConfig()


def test_bfloat16_survives(tmp_path: Path) -> None:
    path = gguf_files.write_gguf(tmp_path / "m.gguf", "qwen2-linear", kind=Kind.BF16)
    convert(path, tmp_path / "out")
    table = checkpoint.load_params(tmp_path / "out")["embed"]
    expected = cases.weights("qwen2-linear")["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(table), expected)


def test_end_tokens(tmp_path: Path) -> None:
    """Named ones first, then the chat markers among the control tokens."""

    def more(writer: gguf.GGUFWriter) -> None:
        for table in writer.kv_data:
            table.pop("tokenizer.ggml.tokens", None)
            table.pop("tokenizer.ggml.token_type", None)
        writer.add_token_list(["a", "<|eot_id|>", "</s>", "<|im_end|>", "<|eom_id|>"])
        writer.add_token_types([1, 3, 3, 1, 3])
        writer.add_eot_token_id(0)

    assert read_config(gguf_files.write_gguf(tmp_path / "m.gguf", "qwen2-linear", more=more)).eos_ids == (2, 0, 1, 4)
