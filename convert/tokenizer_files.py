"""The tokenizer's part of a converted folder: tokenizer.json, its config and the chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from aspire_jax.errors import InputError
from convert.gguf_tokenizer import build_tokenizer
from convert.source import Source

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
# Copied where present; everything else (vocab.json, tokenizer.model) repeats what tokenizer.json says.
_COPIED = (TOKENIZER, CONFIG, "special_tokens_map.json", "chat_template.jinja", "chat_template.json")


def write(source: Source, dst: Path) -> list[Path]:
    """Writes the tokenizer files of `source` into folder `dst`; returns the source files that were copied.

    Raises:
      InputError: the source has no tokenizer, or one that cannot be read.
    """
    if source.gguf is not None:
        tokenizer, config = build_tokenizer(source.gguf)
        (dst / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        (dst / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return []
    return copy(source.path, dst)


def copy(src: Path, dst: Path) -> list[Path]:
    """Copies the tokenizer files of folder `src` to `dst` after reading them once.

    Raises:
      InputError: no tokenizer.json, or a damaged one.
    """
    if not (src / TOKENIZER).is_file():
        raise InputError(
            f"{src}: no {TOKENIZER}, expected a fast tokenizer (transformers' AutoTokenizer saves one) "
            "or --no-tokenizer"
        )
    try:
        Tokenizer.from_file(str(src / TOKENIZER))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise InputError(f"{src / TOKENIZER}: {error}, expected a tokenizer of the tokenizers library") from error
    copied = [src / name for name in _COPIED if (src / name).is_file()]
    for file in copied:
        shutil.copyfile(file, dst / file.name)
    return copied
