"""GGUF files: metadata and tensor table.

The `gguf` package knows the quantised formats and decodes them. Its reader, though, maps the whole file and
believes every count in it, so that a damaged file ends in an endless loop or an IndexError; the table is
therefore parsed here, each read checked against the file's size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from aspire_jax.errors import InputError
from convert.tensors import FLOATS, Tensor

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file: `metadata` by key (numbers, strings, lists of them) and `tensors` by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_gguf(path: Path) -> GgufFile:
    """Parses the header of the GGUF file `path`; no tensor is read.

    Raises:
      InputError: not GGUF, another version or byte order, truncated, or a tensor of a type that the gguf package
        cannot dequantise.
    """
    try:
        with path.open("rb") as stream:
            return _Parser(path, stream, path.stat().st_size).parse()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins like GGUF or is named so."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == MAGIC or path.suffix == ".gguf"


class _Parser:
    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self.path, self.stream, self.size = path, stream, size
        self.where = "header"

    def parse(self) -> GgufFile:
        magic = self.take(4)
        if magic != MAGIC:
            raise InputError(f"{self.path}: begins with {magic!r}, expected {MAGIC!r} of a GGUF file")
        version = self.number("<u4")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            found = "big-endian GGUF" if swapped else f"GGUF version {version}"
            raise InputError(f"{self.path}: {found}, expected little-endian version 2 or 3")
        n_tensors, n_fields = self.number("<u8"), self.number("<u8")
        metadata: dict[str, Any] = {}
        for index in range(n_fields):
            self.where = f"metadata field {index} of {n_fields}"
            key = self.string()
            self.where = f"metadata field {key}"
            if key in metadata:
                raise InputError(f"{self.path}: {self.where} appears twice")
            metadata[key] = self.value(self.number("<u4"))
        table = []
        for index in range(n_tensors):
            self.where = f"tensor {index} of {n_tensors}"
            table.append(self.tensor_entry())
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise InputError(f"{self.path}: general.alignment is {alignment!r}, expected a positive whole number")
        start = -(-self.stream.tell() // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in table:
            if name in tensors:
                raise InputError(f"{self.path}: tensor {name} appears twice")
            tensors[name] = self.tensor(name, shape, kind, start + offset)
        return GgufFile(self.path, metadata, tensors)

    def take(self, n: int) -> bytes:
        if n > self.size - self.stream.tell():
            raise InputError(f"{self.path}: truncated or corrupt in {self.where}: {n} bytes expected")
        return self.stream.read(n)

    def number(self, dtype: str) -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0].item()

    def string(self) -> str:
        raw = self.take(self.number("<u8"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: {self.where} is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth > 3:
            raise InputError(f"{self.path}: {self.where} has value type {kind}, expected 0 to 12")
        element, n = self.number("<u4"), self.number("<u8")
        if element in _SCALARS:
            dtype = np.dtype(_SCALARS[element])
            return np.frombuffer(self.take(n * dtype.itemsize), dtype).tolist()
        if element == _STRING:
            return self.strings(n)
        return [self.value(element, depth + 1) for _ in range(n)]

    def strings(self, n: int) -> list[str]:
        """A list of strings, which in a tokenizer's vocabulary is long: no numpy call for each."""
        if n * 8 > self.size - self.stream.tell():
            raise InputError(f"{self.path}: truncated or corrupt in {self.where}: {n} strings expected")
        out = []
        for _ in range(n):
            (length,) = struct.unpack("<Q", self.take(8))
            out.append(self.take(length))
        try:
            return [raw.decode("utf-8") for raw in out]
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: {self.where} is not UTF-8") from error

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        self.where = f"tensor {name}"
        n_axes = self.number("<u4")
        if not 1 <= n_axes <= 4:
            raise InputError(f"{self.path}: {self.where} has {n_axes} axes, expected 1 to 4")
        shape = tuple(self.number("<u8") for _ in range(n_axes))[::-1]  # the file lists the contiguous axis first
        return name, shape, self.number("<u4"), self.number("<u8")

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
        decode, label, block, block_bytes = _format(self.path, name, kind)
        if shape[-1] % block:
            raise InputError(f"{self.path}: tensor {name} has rows of {shape[-1]}, expected a multiple of {block}")
        row_bytes = shape[-1] // block * block_bytes
        size = math.prod(shape[:-1]) * row_bytes
        if offset + size > self.size:
            raise InputError(
                f"{self.path}: tensor {name} ends at byte {offset + size} of a file of {self.size}, file truncated"
            )
        return Tensor(
            name=name, file=self.path, kind=label, shape=shape, offset=offset, size=size, decode=decode,
            row_bytes=row_bytes if decode else 0,
        )  # fmt: skip


def _format(path: Path, name: str, kind: int) -> tuple[Any, str, int, int]:
    """Decoder, label, elements per block and bytes per block of GGML type number `kind`."""
    import gguf
    from gguf import quants

    try:
        ggml = gguf.GGMLQuantizationType(kind)
    except ValueError as error:
        raise InputError(f"{path}: tensor {name} has type number {kind}, unknown to gguf") from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[ggml]
    if ggml.name in FLOATS:
        return None, ggml.name, 1, FLOATS[ggml.name].itemsize
    if not _decodable(ggml):
        raise InputError(f"{path}: tensor {name} has type {ggml.name}, which the gguf package cannot dequantise")
    return functools.partial(quants.dequantize, qtype=ggml), ggml.name, block, block_bytes


@functools.cache
def _decodable(ggml: Any) -> bool:
    import gguf
    from gguf import quants

    try:
        quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[ggml][1]), np.uint8), ggml)
    except NotImplementedError:
        return False
    return True
