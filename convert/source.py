"""Opens what the user points at, a Hugging Face folder or a GGUF file, as one kind of thing."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from aspire_jax.config import ModelConfig
from aspire_jax.errors import InputError
from convert import names
from convert.gguf_config import gguf_config
from convert.gguf_file import GgufFile, is_gguf, read_gguf
from convert.hf_config import CONFIG, GENERATION, read_hf_config
from convert.layouts import llama_gguf_fix
from convert.names import Part
from convert.safetensors_file import INDEX, read_folder
from convert.tensors import FLOATS, Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A checked checkpoint in a foreign format; nothing but its tables has been read.

    Attributes:
      path: what the user named.
      kind: "huggingface" or "gguf".
      config: the model.
      parts: every tensor the model needs, by what it is.
      fix: corrects a part after reading (Llama's row order in GGUF).
      gguf: the GGUF file, for its tokenizer; None for a folder.
    """

    path: Path
    kind: str
    config: ModelConfig
    parts: dict[Part, Tensor]
    fix: Callable[[str, np.ndarray], np.ndarray]
    gguf: GgufFile | None = None

    def read(self, part: Part, dtype: np.dtype) -> np.ndarray:
        """One part's values, [out, in] as the published checkpoints have them."""
        return self.fix(part.role, self.parts[part].read(dtype))

    @property
    def files(self) -> list[Path]:
        """The files with weights, config and index, sorted."""
        weights = {tensor.file for tensor in self.parts.values()}
        beside = {self.path / name for name in (CONFIG, GENERATION, INDEX)}
        return sorted(weights | {file for file in beside if file.is_file()})

    @property
    def natural_dtype(self) -> str:
        """The dtype that holds most of the weights; float32 where they are quantised (it holds every value exactly)."""
        bytes_of: collections.Counter[str] = collections.Counter()
        for tensor in self.parts.values():
            bytes_of[tensor.kind if tensor.kind in FLOATS else "F32"] += tensor.size
        return str(FLOATS[bytes_of.most_common(1)[0][0]])


def read_config(path: str | Path) -> ModelConfig:
    """The model config of a GGUF file, or of a Hugging Face folder (a config.json is enough).

    Raises:
      InputError: neither, damaged, or a model that this package does not run.
    """
    path = Path(path)
    if is_gguf(path):
        return gguf_config(read_gguf(path))
    if (path / CONFIG).is_file():
        return read_hf_config(path)
    raise _neither(path)


def open_source(path: Path) -> Source:
    """Opens and checks a checkpoint: its config, and name and shape of every tensor.

    Raises:
      InputError: names file and tensor.
    """
    if is_gguf(path):
        gguf = read_gguf(path)
        config = gguf_config(gguf)
        parts = names.match(config, names.GGUF, gguf.tensors, str(path))
        return Source(path=path, kind="gguf", config=config, parts=parts, fix=llama_gguf_fix(config), gguf=gguf)
    if not (path / CONFIG).is_file():
        raise _neither(path)
    config = read_hf_config(path)
    tensors = read_folder(path)
    parts = names.match(config, names.HF, tensors, str(path))
    if config.tie_embeddings:
        _check_tied(tensors)
    return Source(path=path, kind="huggingface", config=config, parts=parts, fix=lambda _, value: value)


def _check_tied(tensors: dict[str, Tensor]) -> None:
    """Some tied checkpoints store the output projection anyway; it must then be the embedding, bit for bit."""
    output = tensors.get(names.HF.name(Part("unembed", None)))
    if output is None:
        return
    table = tensors[names.HF.name(Part("embed", None))]
    if output.kind == table.kind and output.shape == table.shape and _same_bytes(output, table):
        return
    raise InputError(
        f"{output.file}: tensor {output.name} differs from {table.name}, expected equal tensors or "
        "tie_word_embeddings false"
    )


def _same_bytes(a: Tensor, b: Tensor, block: int = 16 << 20) -> bool:
    with a.file.open("rb") as first, b.file.open("rb") as second:
        first.seek(a.offset)
        second.seek(b.offset)
        return all(
            first.read(min(block, a.size - start)) == second.read(min(block, a.size - start))
            for start in range(0, a.size, block)
        )


def _neither(path: Path) -> InputError:
    if not path.exists():
        return InputError(f"{path}: no such file or folder, expected a Hugging Face folder or a GGUF file")
    what = f"a folder without {CONFIG}" if path.is_dir() else "not a GGUF file"
    return InputError(f"{path}: {what}, expected a Hugging Face folder or a GGUF file")
