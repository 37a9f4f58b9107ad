"""safetensors files and sharded folders of them.

The format is an eight-byte length, a JSON table and the data. The table is parsed here, and not by the
safetensors package, for two reasons: a tensor must be read without mapping its file (mapped pages count as this
process's memory), and a damaged table must be reported by tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from aspire_jax.errors import InputError
from convert.fields import read_json
from convert.tensors import FLOATS, NAME_OF, Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20  # the limit of the safetensors package


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder by name, from one file or from the shards of its index.

    Raises:
      InputError: no weights, a missing shard, an index that disagrees with its shards, a tensor in two files, or
        whatever `read_file` refuses.
    """
    index = folder / INDEX
    if index.is_file():
        return _read_shards(folder, index)
    if (folder / SINGLE).is_file():
        return read_file(folder / SINGLE)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return read_file(others[0])
    if others:
        raise InputError(f"{folder}: {len(others)} safetensors files, expected {INDEX} beside them")
    raise InputError(f"{folder}: no weights, expected {SINGLE} or {INDEX}")


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index}: weight_map is missing or not an object of file names")
    found: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        file = folder / shard
        if Path(shard).name != shard or not file.is_file():
            raise InputError(f"{index}: shard {shard} is missing in {folder}")
        for name, tensor in read_file(file).items():
            if name in found:
                raise InputError(f"{file}: tensor {name} is also in {found[name].file.name}")
            if weight_map.get(name) != shard:
                said = weight_map.get(name, "no file")
                raise InputError(f"{index}: tensor {name} lies in {shard}, the index says {said}")
            found[name] = tensor
    for name, shard in weight_map.items():
        if name not in found:
            raise InputError(f"{index}: tensor {name} is missing in shard {shard}")
    return found


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file by name; only its table is read.

    Raises:
      InputError: unreadable, truncated, a damaged table, overlapping tensors, or a dtype other than F32, F16, BF16.
    """
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            length = struct.unpack("<Q", stream.read(8))[0] if size >= 8 else -1
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise InputError(f"{path}: header of {length} bytes in a file of {size}, truncated or corrupt")
            raw = stream.read(length)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    tensors: dict[str, Tensor] = {}
    spans = []
    for name, entry in _header(path, raw).items():
        if name == "__metadata__":
            continue
        tensor = _tensor(path, name, entry, 8 + length, size)
        tensors[name] = tensor
        spans.append((tensor.offset, tensor.offset + tensor.size, name))
    end = 8 + length
    for start, stop, name in sorted(spans):
        if start != end:
            raise InputError(f"{path}: tensor {name} begins at byte {start}, expected {end} (gap or overlap)")
        end = stop
    if end != size:
        raise InputError(f"{path}: {size - end} bytes after the last tensor, expected none")
    return tensors


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{path}: tensor {twice} appears twice")
        return table

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: corrupt header: {error}") from error
    if not isinstance(header, dict):
        raise InputError(f"{path}: corrupt header: a JSON {type(header).__name__}, expected an object")
    return header


def _tensor(path: Path, name: str, entry: Any, data_start: int, size: int) -> Tensor:
    where = f"{path}: tensor {name}"
    try:
        kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: corrupt entry {str(entry)[:80]}") from error
    if kind not in FLOATS:
        raise InputError(f"{where} has dtype {kind}, expected F32, F16 or BF16")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise InputError(f"{where}: corrupt entry {str(entry)[:80]}")
    if stop - start != math.prod(shape) * FLOATS[kind].itemsize:
        raise InputError(f"{where}: {stop - start} bytes for {kind} {list(shape)}, corrupt header")
    if data_start + stop > size:
        raise InputError(f"{where} ends at byte {data_start + stop} of a file of {size}, file truncated")
    return Tensor(name=name, file=path, kind=kind, shape=shape, offset=data_start + start, size=stop - start)


def write_file(
    path: Path, plan: list[tuple[str, np.dtype, tuple[int, ...]]], values: Iterator[np.ndarray]
) -> Iterator[str]:
    """Writes one safetensors file tensor by tensor and yields each name when it is written.

    Args:
      path: the file to create.
      plan: name, dtype and shape of each tensor.
      values: the arrays, in the order of `plan`; each is taken when it is needed.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in plan:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAME_OF[str(dtype)], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the data begins aligned
    with path.open("xb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for name, dtype, shape in plan:
            value = next(values)
            if value.dtype != dtype or value.shape != shape:
                raise ValueError(f"{name}: {value.dtype}{value.shape}, expected {dtype}{shape}")
            stream.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            yield name
