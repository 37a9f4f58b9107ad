"""A converted model in memory: its config, its params as the engine reads them, its tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from aspire_jax import checkpoint, params
from aspire_jax.config import ModelConfig
from aspire_jax.errors import InputError
from aspire_jax.params import Params

if TYPE_CHECKING:
    from aspire_jax.tokenizer import Tokenizer
    from convert.progress import Progress


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What `generate` and `stream` need of a model.

    Attributes:
      config: its sizes.
      params: the parameters; layers unstacked on a CPU (see `params.unstack`), elsewhere stacked: they are scanned.
      tokenizer: None for a model converted without one; prompts must then be token ids and texts stay empty.
      name: what messages call it.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    name: str = "model"

    @property
    def dtype(self) -> str:
        """Name of the parameters' dtype, which the cache shares."""
        return str(jax.tree.leaves(self.params)[0].dtype)


def load(path_or_alias: str | Path, *, dtype: str | None = None, progress: Progress | None = None) -> Model:
    """Loads a converted model.

    Args:
      path_or_alias: a folder that `aspire convert` wrote, or the short name of a model that an installed package
        carries ("smollm2-135m"), which is converted into the cache folder on first use.
      dtype: "float32", "bfloat16" or "float16" in place of the stored dtype.
      progress: told how the conversion goes, where one is needed.

    Raises:
      InputError: no such model, or a damaged one; names the folder and what was expected.
    """
    if dtype is not None and dtype not in checkpoint.DTYPES:
        raise InputError(f"dtype: {dtype!r}, expected one of {', '.join(checkpoint.DTYPES)}")
    folder = find(path_or_alias, progress)
    config = checkpoint.load_config(folder)
    restored = checkpoint.load_params(folder, config, dtype=dtype)
    if next(iter(jax.tree.leaves(restored)[0].devices())).platform == "cpu":
        restored = params.unstack(restored)
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        from aspire_jax.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(folder)
    name = str(path_or_alias) if str(path_or_alias) != str(folder) else folder.resolve().name
    return Model(config, restored, tokenizer, name)


def find(path_or_alias: str | Path, progress: Progress | None = None) -> Path:
    """The converted folder that `path_or_alias` means; an alias is converted on first use.

    Raises:
      InputError: as `load`.
    """
    path = Path(path_or_alias).expanduser()
    if checkpoint.is_checkpoint(path):
        return path
    # The one place where a library call may convert: only here, so that nothing else waits for the import.
    from convert import ALIASES, resolve

    if str(path_or_alias) in ALIASES:
        name = str(path_or_alias)
        return resolve(name) if progress is None else resolve(name, progress=progress)
    foreign = "a GGUF file" if path.is_file() and path.suffix == ".gguf" else ""
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        foreign = "a Hugging Face folder"
    if foreign:
        raise InputError(f"{path}: {foreign}, expected a converted folder: run `aspire convert {path} DST` first")
    if path.exists():
        raise InputError(f"{path}: no {checkpoint.CONFIG_FILE} there, expected a folder that `aspire convert` wrote")
    raise InputError(f"model: {str(path_or_alias)!r}, expected a converted folder or one of {', '.join(ALIASES)}")
