"""A converted folder back to a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from aspire_jax import checkpoint, params
from aspire_jax.config import ModelConfig
from aspire_jax.errors import InputError
from convert import layouts, manifest, tokenizer_files
from convert.hf_config import CONFIG, write_hf_config
from convert.manifest import Manifest
from convert.names import HF, Part, foreign_shapes
from convert.progress import Progress, silent
from convert.safetensors_file import INDEX, SINGLE, write_file
from convert.staging import new_folder
from convert.tensors import narrow

Plan = list[tuple[str, np.dtype, tuple[int, ...]]]


def to_hf(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: bool = True,
    shard_bytes: int = 4 << 30,
    progress: Progress = silent,
) -> Manifest:
    """Writes the converted model in folder `src` as a Hugging Face folder.

    Without `dtype`, every tensor equals the one `src` was converted from bit for bit.

    Args:
      src: a folder that `convert` wrote.
      dst: the folder to create; must not exist.
      dtype: as in `convert`; None keeps the stored one.
      tokenizer: whether the tokenizer's files are part of the result.
      shard_bytes: largest size of one safetensors file, unless a single tensor is larger.
      progress: called with stage, bytes done and bytes in all.

    Raises:
      InputError: bad input, or a model that its family's config.json cannot describe.
      OSError: the disk refused.
    """
    src, dst = Path(src), Path(dst)
    if dtype is not None and dtype not in checkpoint.DTYPES:
        raise InputError(f"dtype: {dtype!r}, expected one of {', '.join(checkpoint.DTYPES)}")
    config = checkpoint.load_config(src)
    expected_bias = config.family == "qwen2" or config.o_bias
    if config.qkv_bias != expected_bias or (config.family in ("qwen2", "mistral") and config.o_bias):
        raise InputError(f"{src}: biases that a {config.family} config.json cannot describe")
    with new_folder(dst) as work:
        reader = checkpoint.Reader(src, config)
        kind = np.dtype(dtype or reader.dtype)
        values = write_hf_config(config, str(kind))
        (work / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if tokenizer:
            tokenizer_files.copy(src, work)
        shapes = {HF.name(part): shape for part, shape in foreign_shapes(config).items()}
        order = [(name, kind, shapes[name]) for name in _order(config)]
        _write_shards(work, order, _tensors(reader, config, kind, src), shard_bytes, progress)
        result = Manifest(
            source=src.resolve().name,
            kind="orbax",
            target="huggingface",
            family=config.family,
            dtype=str(kind),
            parameters=params.count(config),
            tensors=len(order),
            files=tuple(manifest.digest([src / checkpoint.CONFIG_FILE])),
            versions=manifest.versions(),
        )
        (work / manifest.FILE).write_text(result.to_json(), encoding="utf-8")
    return result


def _leaves(config: ModelConfig) -> Iterator[tuple[str, int | None, list[Part]]]:
    """Every leaf slice of the checkpoint with the foreign parts it is made of, in the order they are written."""
    known = checkpoint.leaf_shapes(config)
    yield "embed", None, [Part("embed", None)]
    for layer in range(config.n_layers):
        for leaf, roles in layouts.LAYER_LEAVES.items():
            if f"layers.{leaf}" in known:
                yield f"layers.{leaf}", layer, [Part(role, layer) for role in roles]
    yield "final_norm", None, [Part("final_norm", None)]
    if not config.tie_embeddings:
        yield "unembed", None, [Part("unembed", None)]


def _order(config: ModelConfig) -> list[str]:
    return [HF.name(part) for _, _, parts in _leaves(config) for part in parts]


def _tensors(reader: checkpoint.Reader, config: ModelConfig, kind: np.dtype, src: Path) -> Iterator[np.ndarray]:
    for name, layer, _ in _leaves(config):
        value = reader.read(name, layer)
        leaf = name.removeprefix("layers.")
        for part in [value] if layer is None else layouts.unpack(config, leaf, value):
            yield part if part.dtype == kind else narrow(part, kind, f"{src}: {name}")


def _write_shards(work: Path, order: Plan, tensors: Iterator[np.ndarray], limit: int, progress: Progress) -> None:
    shards: list[Plan] = [[]]
    for entry in order:
        if shards[-1] and sum(map(_bytes, shards[-1])) + _bytes(entry) > limit:
            shards.append([])
        shards[-1].append(entry)
    total, done = sum(map(_bytes, order)), 0
    sizes = {entry[0]: _bytes(entry) for entry in order}
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for name in write_file(work / file, shard, tensors):
            weight_map[name] = file
            done += sizes[name]
            progress("weights", done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (work / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes(entry: tuple[str, np.dtype, tuple[int, ...]]) -> int:
    return int(np.prod(entry[2], dtype=np.int64)) * entry[1].itemsize
