"""Single arrays of an Orbax checkpoint, one leaf or one layer at a time.

Orbax saves a whole tree at once; a converter must not hold one. `Writer` therefore lets Orbax write the tree's
description from one-element stand-ins and then creates every array in Orbax's own layout (Zarr 2, one directory
a leaf, one chunk a layer) with TensorStore, the library Orbax itself writes with. What results is read back by
Orbax's ordinary checkpointers.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from aspire_jax import params as params_lib
from aspire_jax.config import ModelConfig
from aspire_jax.errors import InputError

PARAMS_DIR = "params"
DTYPES = ("float32", "bfloat16", "float16")

# Rows of an unstacked table (embedding) go into chunks of about this many bytes.
_CHUNK_BYTES = 64 << 20


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of `config` by its dotted name ("layers.qkv") with its shape, in tree order."""
    tree = params_lib.abstract(config, jnp.float32)
    return {dotted(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}


class Writer:
    """Writes an Orbax checkpoint one leaf, or one layer of a stacked leaf, at a time.

    Memory in use is that of the array handed to `write`. `finish` fails where a part was never written.
    """

    def __init__(self, path: Path, config: ModelConfig, dtype: str) -> None:
        """Creates `path`/params. `dtype`: one of `DTYPES`, of every leaf.

        Raises:
          OSError: the disk refuses.
        """
        self._folder = (path / PARAMS_DIR).absolute()
        self._dtype = np.dtype(jnp.dtype(dtype))
        self.shapes = leaf_shapes(config)
        self._missing = {
            (name, layer)
            for name, shape in self.shapes.items()
            for layer in (range(shape[0]) if _stacked(name) else (None,))
        }
        standins = jax.tree.map(
            lambda leaf: np.zeros((1,) * len(leaf.shape), self._dtype), params_lib.abstract(config, jnp.float32)
        )
        _reserve(path)
        try:
            with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
                checkpointer.save(self._folder, args=ocp.args.PyTreeSave(standins))
            self._arrays = {name: self._create(name, shape) for name, shape in self.shapes.items()}
        except Exception as error:  # a disk that refuses is one of several types here
            raise OSError(f"{self._folder}: {first_line(error)}") from error

    def _create(self, name: str, shape: tuple[int, ...]) -> Any:
        rows = max(1, _CHUNK_BYTES // max(1, math.prod(shape[1:]) * self._dtype.itemsize))
        chunk = 1 if _stacked(name) else min(rows, shape[0])
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(self._folder / name)},
            "metadata": {
                "shape": shape,
                "chunks": [chunk, *shape[1:]],
                "compressor": {"id": "zstd", "level": 1},
                "dimension_separator": ".",
            },
            "dtype": self._dtype.name,
            "store_data_equal_to_fill_value": True,  # a chunk of zeros is data; Orbax reads a missing chunk as damage
        }
        return ts.open(spec, create=True, delete_existing=True).result()

    def write(self, name: str, layer: int | None, value: np.ndarray) -> None:
        """Writes leaf `name` ("embed") whole, or layer `layer` of the stacked leaf ("layers.qkv").

        Raises:
          ValueError: an unknown or repeated part, a wrong shape or dtype (a defect of the caller).
          OSError: the disk refuses, for instance because it is full.
        """
        want = self.shapes[name][1:] if layer is not None else self.shapes[name]
        if value.shape != want or value.dtype != self._dtype or (name, layer) not in self._missing:
            raise ValueError(f"{name}[{layer}]: {value.dtype}{value.shape}, expected {self._dtype}{want}, once")
        array = self._arrays[name]
        step = array.chunk_layout.write_chunk.shape[0]
        try:
            if layer is not None:
                array[layer].write(value).result()
            else:  # a chunk at a time: TensorStore would otherwise copy and compress the whole table at once
                for start in range(0, value.shape[0], step):
                    stop = min(start + step, value.shape[0])
                    array[start:stop].write(value[start:stop]).result()
        except ValueError as error:  # TensorStore's only error type, whatever the cause
            raise OSError(f"{self._folder / name}: {first_line(error)}") from error
        self._missing.remove((name, layer))

    def finish(self) -> None:
        """Checks that every part was written.

        Raises:
          ValueError: one was not.
        """
        if self._missing:
            raise ValueError(f"{self._folder}: parts never written: {sorted(map(str, self._missing))[:4]}")


def open_array(folder: Path, name: str) -> Any:
    """The TensorStore array of leaf `name`, as `Writer` or Orbax itself stored it.

    Raises:
      InputError: it is missing or its description is damaged.
    """
    store: Mapping[str, Any]
    if is_ocdbt(folder):
        store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": str(folder / name)}
    try:
        return ts.open({"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}, open=True).result()
    except ValueError as error:
        raise InputError(f"{folder}: parameter {name}: {first_line(error)}, expected an undamaged array") from error


def check_chunks(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses a checkpoint that lacks a chunk, by name: Orbax would fail in a thread and leave it unfinished."""
    if is_ocdbt(folder):
        return  # few large files, which name each other
    for name, shape in shapes.items():
        chunk = open_array(folder, name).chunk_layout.read_chunk.shape
        present = {entry.name for entry in (folder / name).iterdir()}
        for index in np.ndindex(*(-(-size // step) for size, step in zip(shape, chunk, strict=True))):
            file = ".".join(map(str, index))
            if file not in present:
                raise InputError(f"{folder}: parameter {name}: chunk {file} is missing, expected an undamaged array")


def is_ocdbt(folder: Path) -> bool:
    """Whether Orbax stored `folder` in its own key-value format, as it does unless told otherwise."""
    return (folder / "manifest.ocdbt").exists()


def _stacked(name: str) -> bool:
    return name.startswith("layers.")


def dotted(path: Any) -> str:
    """The name of a leaf ("layers.qkv") from its key path in the tree."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


def first_line(error: BaseException) -> str:
    """The cause at the root of `error`, without the paragraphs that TensorStore appends."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(" [", 1)[0]


def _reserve(folder: Path, size: int = 1 << 20) -> None:
    """Raises OSError where `folder` has no room even for a checkpoint's description.

    Orbax writes that from threads of its own, which print tracebacks when they fail.
    """
    file = folder / ".room"
    try:
        file.write_bytes(bytes(size))
    finally:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what Orbax logs: a warning for each checkpoint that is not OCDBT, tracebacks beside what it raises."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
