"""What a converted folder says about where it came from."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from pathlib import Path

FILE = "manifest.json"
_PACKAGES = ("aspire-jax", "jax", "orbax-checkpoint", "tensorstore", "numpy", "gguf", "tokenizers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file read: its name without folders, its bytes and its SHA-256."""

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Where a converted folder came from and what made it.

    Attributes:
      source: name of the source folder or file, without the folders above it.
      kind: format of the source: "huggingface", "gguf" or "orbax".
      target: format written: "orbax" or "huggingface".
      family: the model's family.
      dtype: dtype of every parameter written.
      parameters: number of parameters (a tied output projection counts once).
      tensors: number of foreign tensors.
      files: every source file with its SHA-256.
      versions: versions of Python and of the packages that took part.
    """

    source: str
    kind: str
    target: str
    family: str
    dtype: str
    parameters: int
    tensors: int
    files: tuple[SourceFile, ...]
    versions: dict[str, str]

    def to_json(self) -> str:
        """The manifest as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def versions() -> dict[str, str]:
    """Python and the packages that shape the output; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def digest(files: Iterable[Path]) -> Iterable[SourceFile]:
    """Each file with its size and SHA-256, one at a time."""
    for path in files:
        with path.open("rb") as stream:
            sha = hashlib.file_digest(stream, "sha256").hexdigest()
        yield SourceFile(name=path.name, size=path.stat().st_size, sha256=sha)
