"""Params on disk: an Orbax checkpoint, written leaf by leaf and checked before it is read.

A folder holds `model.json` (the `ModelConfig`), `params/` (a plain Orbax checkpoint of the tree in
`aspire_jax.params`), the tokenizer's files and, where `convert` made it, `manifest.json`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from aspire_jax import params as params_lib
from aspire_jax.config import ModelConfig
from aspire_jax.errors import InputError
from aspire_jax.leaf_io import (
    DTYPES,
    PARAMS_DIR,
    Writer,
    check_chunks,
    dotted,
    first_line,
    is_ocdbt,
    leaf_shapes,
    open_array,
    quiet,
)
from aspire_jax.params import Params

__all__ = [
    "CONFIG_FILE",
    "DTYPES",
    "PARAMS_DIR",
    "Reader",
    "Writer",
    "is_checkpoint",
    "leaf_shapes",
    "load_config",
    "load_params",
    "save_config",
    "save_params",
    "stored_dtype",
]

CONFIG_FILE = "model.json"


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
    check_chunks(folder, leaf_shapes(config))
    try:
        with quiet(), ocp.StandardCheckpointer() as checkpointer:
            restored: Params = checkpointer.restore(folder, want)
    except Exception as error:  # Orbax and TensorStore raise bare Exceptions for damaged data
        raise InputError(f"{folder}: {first_line(error)}, expected an undamaged checkpoint") from error
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
    for name in want if (folder / "_METADATA").is_file() and not is_ocdbt(folder) else ():
        if not (folder / name).is_dir():
            raise InputError(f"{folder}: parameter {name} is missing")
        open_array(folder, name)
    try:
        with quiet(), ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(folder).item_metadata
        tree = getattr(metadata, "tree", metadata)
        leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
        found = {dotted(key): (tuple(leaf.shape), str(jnp.dtype(leaf.dtype))) for key, leaf in leaves}
    except Exception as error:  # whatever a damaged description makes Orbax raise
        raise InputError(f"{folder}: {first_line(error)}, expected an Orbax checkpoint") from error
    if not found:
        raise InputError(f"{folder}: holds no parameters, expected an Orbax checkpoint")
    return found


class Reader:
    """Reads a checkpoint one leaf, or one layer of a stacked leaf, at a time; the mirror of `Writer`."""

    def __init__(self, path: str | Path, config: ModelConfig) -> None:
        """Checks tree, shapes and dtypes first, as `load_params` does. `path`: folder that holds `params/`."""
        self.dtype = stored_dtype(path, config)
        self._folder = (Path(path) / PARAMS_DIR).absolute()
        self._arrays = {name: open_array(self._folder, name) for name in leaf_shapes(config)}

    def read(self, name: str, layer: int | None = None) -> np.ndarray:
        """Leaf `name` whole, or one layer of a stacked leaf.

        Raises:
          InputError: a chunk is missing or damaged.
        """
        array = self._arrays[name]
        try:
            return np.asarray((array if layer is None else array[layer]).read().result())
        except ValueError as error:
            raise InputError(f"{self._folder}: parameter {name}: {first_line(error)}") from error
