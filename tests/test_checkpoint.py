"""Params on disk: genuine Orbax, restored into any sharding, compared with the config before anything is read."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from aspire_jax import checkpoint, leaf_io, params
from aspire_jax.config import ModelConfig
from aspire_jax.errors import InputError

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=48,
    d_model=24,
    n_layers=3,
    n_heads=8,
    n_kv_heads=4,
    head_dim=6,
    d_ff=40,
    norm_eps=1e-6,
    max_length=64,
    tie_embeddings=False,
    qk_norm=True,
    eos_ids=(3, 5),
)
TREE = params.random(CONFIG, jax.random.key(0))


def write(folder: Path, dtype: str = "float32", *, leave_out: tuple[str, int | None] | None = None) -> Path:
    """The tree, written leaf by leaf."""
    folder.mkdir(exist_ok=True)
    writer = checkpoint.Writer(folder, CONFIG, dtype)
    for path, leaf in jax.tree.leaves_with_path(TREE):
        name = ".".join(key.key for key in path)
        value = np.asarray(leaf).astype(jnp.dtype(dtype))
        for layer in range(CONFIG.n_layers) if name.startswith("layers.") else [None]:
            if (name, layer) != leave_out:
                writer.write(name, layer, value if layer is None else value[layer])
    if leave_out is None:
        writer.finish()
    checkpoint.save_config(folder, CONFIG)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("written"))


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def same(first: Any, second: Any) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), first, second)


def test_load_gives_what_was_written(written: Path) -> None:
    assert checkpoint.is_checkpoint(written)
    assert checkpoint.load_config(written) == CONFIG
    restored = checkpoint.load_params(written)
    same(restored, TREE)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


@pytest.mark.parametrize("make", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
def test_any_orbax_checkpointer_reads_it(make: Any, written: Path) -> None:
    """With an abstract tree, and without one: the description is Orbax's own."""
    with make() as checkpointer:
        same(checkpointer.restore(written / "params"), TREE)
        if make is ocp.StandardCheckpointer:
            same(checkpointer.restore(written / "params", params.abstract(CONFIG, jnp.float32)), TREE)


def test_one_chunk_a_layer(written: Path) -> None:
    files = {file.name for file in (written / "params" / "layers.qkv").iterdir()}
    assert files == {".zarray", "0.0.0.0.0", "1.0.0.0.0", "2.0.0.0.0"}


def test_a_large_table_is_written_in_chunks(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(leaf_io, "_CHUNK_BYTES", 10 * 24 * 4)
    folder = write(tmp_path)
    assert len(list((folder / "params" / "embed").glob("[0-9]*"))) == 5
    same(checkpoint.load_params(folder), TREE)


def test_save_params_and_load(tmp_path: Path) -> None:
    checkpoint.save_params(tmp_path, TREE)
    same(checkpoint.load_params(tmp_path, CONFIG), TREE)
    with pytest.raises(InputError, match="params: exists"):
        checkpoint.save_params(tmp_path, TREE)


@pytest.mark.parametrize("saved_whole", [False, True])
def test_reader(saved_whole: bool, written: Path, tmp_path: Path) -> None:
    folder = written
    if saved_whole:
        folder = tmp_path
        checkpoint.save_params(folder, TREE)
    reader = checkpoint.Reader(folder, CONFIG)
    assert reader.dtype == jnp.float32
    np.testing.assert_array_equal(reader.read("embed"), np.asarray(TREE["embed"]))
    np.testing.assert_array_equal(reader.read("layers.down", 2), np.asarray(TREE["layers"]["down"][2]))


@pytest.mark.parametrize("dtype", checkpoint.DTYPES)
def test_dtypes(dtype: str, tmp_path: Path, written: Path) -> None:
    expected = jax.tree.map(lambda leaf: leaf.astype(dtype), TREE)
    stored = checkpoint.load_params(write(tmp_path, dtype))
    cast = checkpoint.load_params(written, dtype=dtype)
    for restored in (stored, cast):
        same(restored, expected)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(restored)} == {dtype}


@pytest.mark.parametrize("saved_whole", [False, True])
def test_restores_into_shardings(saved_whole: bool, written: Path, tmp_path: Path) -> None:
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = params.shardings(CONFIG, mesh)
    folder = written
    if saved_whole:
        folder = tmp_path
        checkpoint.save_params(folder, TREE)
    restored = checkpoint.load_params(folder, CONFIG, shardings=shardings)
    same(restored, TREE)
    jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf)), restored, shardings)
    qkv = restored["layers"]["qkv"]
    assert {shard.data.shape for shard in qkv.addressable_shards} == {(3, 24, 1, 4, 6)}


def test_restores_into_one_sharding_for_all(written: Path) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    restored = checkpoint.load_params(written, shardings=everywhere)
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {everywhere}


def fails(folder: Path, *expected: str, config: ModelConfig | None = None) -> None:
    with pytest.raises(InputError) as caught:
        checkpoint.load_params(folder, config)
    for part in (str(folder), *expected):
        assert part in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"n_layers": 4}, "has shape [3, 24], expected [4, 24]"),
        ({"d_ff": 44}, "layers.down has shape [3, 40, 24], expected [3, 44, 24]"),
        ({"vocab_size": 47}, "embed has shape [48, 24], expected [47, 24]"),
        ({"tie_embeddings": True}, "parameter unembed is unknown"),
        ({"qk_norm": False}, "parameter layers.k_norm is unknown"),
        ({"qkv_bias": True}, "parameter layers.qkv_bias is missing"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_loading(
    change: dict[str, Any], expected: str, written: Path, monkeypatch: Any
) -> None:
    """Orbax alone would restore the part that fits (orbax issue 2972)."""
    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", lambda *_: pytest.fail("began to load"))
    fails(written, expected, config=dataclasses.replace(CONFIG, **change))


def test_mixed_dtypes_are_refused(tmp_path: Path) -> None:
    mixed = {**TREE, "embed": TREE["embed"].astype(jnp.bfloat16)}
    checkpoint.save_params(tmp_path, mixed)
    fails(tmp_path, "dtypes bfloat16, float32, expected one dtype", config=CONFIG)


def test_integers_are_refused(tmp_path: Path) -> None:
    checkpoint.save_params(tmp_path, jax.tree.map(lambda leaf: leaf.astype(jnp.int32), TREE))
    fails(tmp_path, "has dtype int32, expected one of float32, bfloat16, float16", config=CONFIG)


def test_missing_chunk(copy: Path) -> None:
    (copy / "params" / "layers.down" / "1.0.0").unlink()
    fails(copy, "layers.down")
    with pytest.raises(InputError, match=r"layers\.down"):
        checkpoint.Reader(copy, CONFIG).read("layers.down", 1)


def test_damaged_chunk(copy: Path) -> None:
    """Restored in a process of its own, since Orbax abandons coroutines here, which would warn in other tests."""
    file = copy / "params" / "layers.down" / "1.0.0"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"layers\.down"):
        checkpoint.Reader(copy, CONFIG).read("layers.down", 1)
    code = (
        f"from aspire_jax import checkpoint as c\ntry: c.load_params({str(copy)!r})\nexcept c.InputError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1 and "layers.down" in done.stdout


def test_missing_leaf(copy: Path) -> None:
    shutil.rmtree(copy / "params" / "layers.down")
    fails(copy, "layers.down")


@pytest.mark.parametrize("name", ["_METADATA", "layers.down/.zarray"])
@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_damaged_description(name: str, text: str, copy: Path) -> None:
    (copy / "params" / name).write_text(text)
    fails(copy)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no model\.json there"):
        checkpoint.load_params(tmp_path)
    fails(tmp_path, "no such folder", config=CONFIG)
    (tmp_path / "params").mkdir()
    fails(tmp_path, "expected an Orbax checkpoint", config=CONFIG)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"family": "llama"}'])
def test_damaged_config(text: str, copy: Path) -> None:
    (copy / checkpoint.CONFIG_FILE).write_text(text)
    with pytest.raises(InputError, match=r"model\.json"):
        checkpoint.load_config(copy)


def test_config_of_another_version(copy: Path) -> None:
    file = copy / checkpoint.CONFIG_FILE
    file.write_text(file.read_text().replace('"d_ff"', '"d_fff"'))
    with pytest.raises(InputError, match="d_fff"):
        checkpoint.load_config(copy)


def test_writer_refuses_what_does_not_belong(tmp_path: Path) -> None:
    writer = checkpoint.Writer(tmp_path, CONFIG, "float32")
    norm = np.zeros(24, np.float32)
    writer.write("final_norm", None, norm)
    for name, layer, value in (
        ("final_norm", None, norm),  # twice
        ("layers.attn_norm", 3, norm),  # beyond the last layer
        ("layers.attn_norm", 0, norm[:-1]),
        ("layers.attn_norm", 0, norm.astype(np.float16)),
    ):
        with pytest.raises(ValueError, match="expected"):
            writer.write(name, layer, value)


def test_writer_notices_what_was_not_written(tmp_path: Path) -> None:
    writer = checkpoint.Writer(tmp_path, CONFIG, "float32")
    with pytest.raises(ValueError, match="never written"):
        writer.finish()


def test_a_layer_of_zeros_is_stored(tmp_path: Path) -> None:
    """TensorStore may leave out chunks of zeros; a restore would then take them for damage."""
    zeros = jax.tree.map(jnp.zeros_like, TREE)
    writer = checkpoint.Writer(tmp_path, CONFIG, "float32")
    for path, leaf in jax.tree.leaves_with_path(zeros):
        name = ".".join(key.key for key in path)
        for layer in range(CONFIG.n_layers) if name.startswith("layers.") else [None]:
            writer.write(name, layer, np.asarray(leaf if layer is None else leaf[layer]))
    writer.finish()
    same(checkpoint.load_params(tmp_path, CONFIG), zeros)
