"""aspire info: what a model is and how many bytes it needs; a config is enough, no weights are read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aspire_jax.cli import setup
from aspire_jax.errors import InputError

if TYPE_CHECKING:
    from aspire_jax.config import ModelConfig

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PAGE = 16  # tokens a page of the cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", metavar="M", help="converted folder, alias, GGUF, or folder with a config.json")
    parser.add_argument("--batch", type=setup.positive, default=1, metavar="B", help="sequences (default: 1)")
    parser.add_argument("--context", type=setup.positive, metavar="S", help="tokens of each (default: the model's)")
    parser.add_argument("--dtype", choices=setup.DTYPES, help="default: the model's")
    setup.add_json(parser, "the figures")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    config, stored = describe(args.model)
    if args.context is not None and args.context > config.max_length:
        raise InputError(f"--context: {args.context}, expected at most the model's {config.max_length}")
    found = figures(config, args.dtype or stored, args.batch, args.context or config.max_length)
    if args.json:
        setup.write_json(args.json, {"model": args.model, **found})
    if args.json != "-":
        _print(args.model, config, found)
    return 0


def describe(model: str) -> tuple[ModelConfig, str]:
    """Config and dtype of a model in any form that the package knows. Reads no weights.

    Raises:
      InputError: none of these forms.
    """
    from aspire_jax import checkpoint
    from convert import ALIASES, read_config

    path = Path(model).expanduser()
    if checkpoint.is_checkpoint(path):
        config = checkpoint.load_config(path)
        return config, str(checkpoint.stored_dtype(path, config))
    if model in ALIASES:
        from convert.aliases import gguf_path

        path = gguf_path(model)
    if not path.exists():
        expected = f"a folder, a GGUF file or one of {', '.join(ALIASES)}"
        raise InputError(f"model: {model!r}, expected {expected}")
    config = read_config(path)
    return config, _huggingface_dtype(path / "config.json") if path.is_dir() else _gguf_dtype(path)


def figures(config: ModelConfig, dtype: str, batch: int, context: int) -> dict[str, Any]:
    """Parameters and bytes; `total_bytes` is weights and cache of `batch` sequences of `context` tokens."""
    from aspire_jax import params

    parameters, size = params.count(config), _SIZES[dtype]
    per_token = 2 * config.n_layers * config.n_kv_heads * config.head_dim * size
    cache = batch * math.ceil(context / _PAGE) * _PAGE * per_token
    return {
        "architecture": dataclasses.asdict(config),
        "parameters": parameters,
        "dtype": dtype,
        "weight_bytes": parameters * size,
        "cache_bytes_per_token": per_token,
        "batch": batch,
        "context": context,
        "cache_bytes": cache,
        "total_bytes": parameters * size + cache,
    }


def _huggingface_dtype(file: Path) -> str:
    """What config.json says; float32, as transformers has it, where it is silent or names another."""
    fields = json.loads(file.read_text(encoding="utf-8"))
    named = fields.get("dtype") or fields.get("torch_dtype")
    return named if named in _SIZES else "float32"


def _gguf_dtype(path: Path) -> str:
    from convert.source import open_source

    return open_source(path).natural_dtype


def _print(name: str, config: ModelConfig, found: dict[str, Any]) -> None:
    c, rope = config, config.rope
    heads = f"{c.n_heads} heads, {c.n_kv_heads} for keys and values, {c.head_dim} wide"
    has = {
        "q/k norm": c.qk_norm,
        "q/k/v bias": c.qkv_bias,
        "output bias": c.o_bias,
        "tied embeddings": c.tie_embeddings,
    }
    extras = [text for text, there in has.items() if there]
    rope_text = f"{rope.kind}, theta {rope.theta:g}" + (f", factor {rope.factor:g}" if rope.kind != "default" else "")
    rows = [
        ("model", name),
        ("architecture", ", ".join([c.family, f"{c.n_layers} layers of {c.d_model}, feed-forward {c.d_ff}", *extras])),
        ("attention", heads),
        ("rope", rope_text),
        ("vocabulary", f"{c.vocab_size:,}"),
        ("maximum length", f"{c.max_length:,} tokens"),
        ("parameters", f"{found['parameters']:,}"),
        ("dtype", found["dtype"]),
        ("weights", _bytes(found["weight_bytes"])),
        ("cache per token", _bytes(found["cache_bytes_per_token"])),
        ("cache", f"{_bytes(found['cache_bytes'])} for {found['batch']} x {found['context']:,} tokens"),
        ("total", _bytes(found["total_bytes"])),
    ]
    for label, value in rows:
        print(f"{label:<16} {value}")


def _bytes(n: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n:,} bytes ({n / size:.2f} {unit})"
    return f"{n:,} bytes"
