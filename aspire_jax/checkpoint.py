"""Params on disk: an Orbax checkpoint, written leaf by leaf and checked before it is read.

A folder holds `model.json` (the `ModelConfig`), `params/` (a plain Orbax checkpoint of the tree in
`aspire_jax.params`), the tokenizer's files and, where `convert` made it, `manifest.json`.

Orbax saves a whole tree at once; a converter must not hold one. `Writer` therefore lets Orbax write the tree's
description from one-element stand-ins and then creates every array in Orbax's own layout (Zarr 2, one directory
a leaf, one chunk a layer) with TensorStore, the library Orbax itself writes with. What results is read back by
Orbax's ordinary checkpointers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
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
from aspire_jax.params import Params

CONFIG_FILE = "model.json"
PARAMS_DIR = "params"
DTYPES = ("float32", "bfloat16", "float16")

# Rows of an unstacked table (embedding) go into chunks of about this many bytes.
_CHUNK_BYTES = 64 << 20


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of `config` by its dotted name ("layers.qkv") with its shape, in tree order."""
    tree = params_lib.abstract(config, jnp.float32)
    return {_dotted(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a folder that holds a converted model."""
    return (Path(path) / CONFIG_FILE).is_file()


def load_config(path: str | Path) -> ModelConfig:
    """The config of the converted model in folder `path`.

    Raises:
      InputError: no such folder, no `model.json` in it, or not a config of this version.
    """
    file = Path(path) / CONFIG_FILE
    try:
        return ModelConfig.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no {CONFIG_FILE} there, expected a folder that `aspire convert` wrote") from error
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{file}: {error}, expected a config that `aspire convert` wrote") from error


def save_config(path: str | Path, config: ModelConfig) -> None:
    """Writes `model.json` into folder `path`, which must exist."""
    (Path(path) / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")


def save_params(path: str | Path, params: Params) -> None:
    """Saves a whole tree (of any sharding) as the Orbax checkpoint `path`/params.

    Raises:
      InputError: `path`/params exists.
    """
    target = (Path(path) / PARAMS_DIR).absolute()
    if target.exists():
        raise InputError(f"{target}: exists, expected a folder without saved params")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target, params)


def load_params(
    path: str | Path,
    config: ModelConfig | None = None,
    dtype: jnp.dtype | type | str | None = None,
    shardings: Any = None,
) -> Params:
    """Restores the params of the converted model in folder `path`.

    The checkpoint's own description (tree, shapes, dtypes) is compared with the one `config` implies before any
    array is read: Orbax by itself restores what matches and may leave the rest out.

    Args:
      path: folder that holds `params/`.
      config: the model; None reads `path`/model.json.
      dtype: dtype of the restored params; None keeps the stored one.
      shardings: tree of shardings as `params.shardings` gives it, or one sharding for every leaf; each device
        then reads only its part. None places everything on the first device.

    Returns:
      A tree of `jax.Array`s as `params.abstract(config, dtype)` describes it.

    Raises:
      InputError: missing or damaged checkpoint, or one that does not fit `config`; names the leaf.
    """
    folder = (Path(path) / PARAMS_DIR).absolute()
    config = load_config(path) if config is None else config
    stored = stored_dtype(path, config)
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(shardings, jax.sharding.Sharding):
        one = shardings
        shardings = jax.tree.map(lambda _: one, params_lib.abstract(config, stored))
    want = params_lib.abstract(config, jnp.dtype(dtype or stored), shardings)
    _check_chunks(folder, leaf_shapes(config))
    try:
        with _quiet(), ocp.StandardCheckpointer() as checkpointer:
            restored: Params = checkpointer.restore(folder, want)
    except Exception as error:  # Orbax and TensorStore raise bare Exceptions for damaged data
        raise InputError(f"{folder}: {_first_line(error)}, expected an undamaged checkpoint") from error
    return restored


def stored_dtype(path: str | Path, config: ModelConfig) -> jnp.dtype:
    """The dtype of the params in folder `path`, after comparing tree, shapes and dtypes with `config`.

    Raises:
      InputError: not a checkpoint, or its tree, a shape or a dtype is not what `config` needs.
    """
    folder = (Path(path) / PARAMS_DIR).absolute()
    want = leaf_shapes(config)
    found = _stored_leaves(folder, want)
    for name in want:
        if name not in found:
            raise InputError(f"{folder}: parameter {name} is missing, expected shape {list(want[name])}")
    for name in found:
        if name not in want:
            raise InputError(f"{folder}: parameter {name} is unknown to this {config.family} config")
    for name, (shape, dtype) in found.items():
        if shape != want[name]:
            raise InputError(f"{folder}: {name} has shape {list(shape)}, expected {list(want[name])}")
        if dtype not in DTYPES:
            raise InputError(f"{folder}: {name} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
    kinds = {dtype for _, dtype in found.values()}
    if len(kinds) != 1:
        raise InputError(f"{folder}: parameters of dtypes {', '.join(sorted(kinds))}, expected one dtype")
    return jnp.dtype(kinds.pop())


def _stored_leaves(folder: Path, want: Iterable[str]) -> dict[str, tuple[tuple[int, ...], str]]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder, expected an Orbax checkpoint")
    # Where the description of one array is damaged, Orbax says nothing of the others and its threads print.
    for name in want if (folder / "_METADATA").is_file() and not _is_ocdbt(folder) else ():
        if not (folder / name).is_dir():
            raise InputError(f"{folder}: parameter {name} is missing")
        _open_array(folder, name)
    try:
        with _quiet(), ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(folder).item_metadata
        tree = getattr(metadata, "tree", metadata)
        leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
        found = {_dotted(key): (tuple(leaf.shape), str(jnp.dtype(leaf.dtype))) for key, leaf in leaves}
    except Exception as error:  # whatever a damaged description makes Orbax raise
        raise InputError(f"{folder}: {_first_line(error)}, expected an Orbax checkpoint") from error
    if not found:
        raise InputError(f"{folder}: holds no parameters, expected an Orbax checkpoint")
    return found


def _open_array(folder: Path, name: str) -> Any:
    """The TensorStore array of leaf `name`, as `Writer` or Orbax itself stored it.

    Raises:
      InputError: it is missing or its description is damaged.
    """
    store: Mapping[str, Any]
    if _is_ocdbt(folder):
        store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": str(folder / name)}
    try:
        return ts.open({"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}, open=True).result()
    except ValueError as error:
        raise InputError(f"{folder}: parameter {name}: {_first_line(error)}, expected an undamaged array") from error


def _check_chunks(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses a checkpoint that lacks a chunk, by name: Orbax would fail in a thread and leave it unfinished."""
    if _is_ocdbt(folder):
        return  # few large files, which name each other
    for name, shape in shapes.items():
        chunk = _open_array(folder, name).chunk_layout.read_chunk.shape
        present = {entry.name for entry in (folder / name).iterdir()}
        for index in np.ndindex(*(-(-size // step) for size, step in zip(shape, chunk, strict=True))):
            file = ".".join(map(str, index))
            if file not in present:
                raise InputError(f"{folder}: parameter {name}: chunk {file} is missing, expected an undamaged array")


def _is_ocdbt(folder: Path) -> bool:
    return (folder / "manifest.ocdbt").exists()


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
            with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
                checkpointer.save(self._folder, args=ocp.args.PyTreeSave(standins))
            self._arrays = {name: self._create(name, shape) for name, shape in self.shapes.items()}
        except Exception as error:  # a disk that refuses is one of several types here
            raise OSError(f"{self._folder}: {_first_line(error)}") from error

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
            raise OSError(f"{self._folder / name}: {_first_line(error)}") from error
        self._missing.remove((name, layer))

    def finish(self) -> None:
        """Checks that every part was written.

        Raises:
          ValueError: one was not.
        """
        if self._missing:
            raise ValueError(f"{self._folder}: parts never written: {sorted(map(str, self._missing))[:4]}")


class Reader:
    """Reads a checkpoint one leaf, or one layer of a stacked leaf, at a time; the mirror of `Writer`."""

    def __init__(self, path: str | Path, config: ModelConfig) -> None:
        """Checks tree, shapes and dtypes first, as `load_params` does. `path`: folder that holds `params/`."""
        self.dtype = stored_dtype(path, config)
        self._folder = (Path(path) / PARAMS_DIR).absolute()
        self._arrays = {name: _open_array(self._folder, name) for name in leaf_shapes(config)}

    def read(self, name: str, layer: int | None = None) -> np.ndarray:
        """Leaf `name` whole, or one layer of a stacked leaf.

        Raises:
          InputError: a chunk is missing or damaged.
        """
        array = self._arrays[name]
        try:
            return np.asarray((array if layer is None else array[layer]).read().result())
        except ValueError as error:
            raise InputError(f"{self._folder}: parameter {name}: {_first_line(error)}") from error


def _stacked(name: str) -> bool:
    return name.startswith("layers.")


def _dotted(path: Any) -> str:
    return ".".join(str(getattr(key, "key", key)) for key in path)


def _first_line(error: BaseException) -> str:
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
def _quiet() -> Iterator[None]:
    """Silences what Orbax logs: a warning for each checkpoint that is not OCDBT, tracebacks beside what it raises."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in file `path`.

    Raises:
      InputError: missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}, expected a JSON object") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: a JSON {type(value).__name__}, expected an object")
    return value
