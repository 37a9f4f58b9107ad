"""What several commands share: the model argument, the compile cache, policy options, JSON output."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aspire_jax.errors import InputError, written_or_standard

if TYPE_CHECKING:
    from aspire_jax.loading import Model

DTYPES = ("float32", "bfloat16", "float16")
_MOST = 2**31 - 1  # of whatever is counted


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """The option that every command with figures has."""
    summary = f"write {what} as JSON; - for standard output alone"
    parser.add_argument("--json", type=written_or_standard, metavar="FILE", help=summary)


def positive(text: str) -> int:
    """An argument's type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    if value > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r}, expected at most {_MOST}")
    return value


def load_model(name: str, *, dtype: str | None = None, quiet: bool = False) -> Model:
    """Loads a model for a command; compiled programs are kept beside converted models from here on."""
    from aspire_jax.loading import load

    use_compile_cache()
    with contextlib.ExitStack() as stack:
        progress = None
        if not quiet:
            from convert.progress import Reporter

            progress = stack.enter_context(Reporter())
        return load(name, dtype=dtype, progress=progress)


def use_compile_cache() -> None:
    """Keeps compiled programs on disk, unless the environment says where or that it should not be."""
    import jax

    from convert.aliases import cache_folder

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def add_implementation(parser: argparse.ArgumentParser) -> None:
    """The option that every command which decodes has."""
    summary = "of attention: plain XLA or GPU kernels (default: the best for the device)"
    parser.add_argument("--implementation", choices=("xla", "pallas"), help=summary)


def refused(error: ValueError) -> InputError:
    """An engine's refusal, by the option that brought it about."""
    option = "--" if str(error).startswith("implementation") else "--policy "
    return InputError(f"{option}{error}")


def policy_options(method: str, given: Sequence[str]) -> dict[str, Any]:
    """The options NAME=VALUE of `--policy` as values of the types that the method's policies declare.

    Raises:
      InputError: no such method or option, or a value of another type; lists what exists.
    """
    from aspire_jax.methods import METHODS

    if method not in METHODS:
        raise InputError(f"--method: {method!r}, expected one of {', '.join(METHODS)}")
    row = METHODS[method]
    known: dict[str, Any] = {}
    for policy in (row.context, row.draft_length):
        hints = typing.get_type_hints(type(policy))
        fields = dataclasses.fields(policy)  # type: ignore[arg-type]
        known |= {f.name: hints[f.name] for f in fields if f.metadata.get("option", True)}
    known |= {"mixed": bool | None, "page_size": int}
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--policy: {text!r}, expected NAME=VALUE")
        if name not in known:
            raise InputError(f"--policy {name}: method {method} has no such option, expected one of {', '.join(known)}")
        if name in options:
            raise InputError(f"--policy {name}: given twice, expected once")
        options[name] = _parse(name, value, known[name])
    return options


def _parse(name: str, text: str, kind: Any) -> Any:
    """`text` as a value of type `kind`: int, float, bool, Literal, whole numbers, or a union of them with None."""
    kinds = (
        typing.get_args(kind)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        else (kind,)
    )
    expected: list[str] = []
    for each in kinds:
        if each is type(None):
            if text.lower() == "none":
                return None
            expected.append("none")
        elif typing.get_origin(each) is typing.Literal:
            if text in typing.get_args(each):
                return text
            expected += typing.get_args(each)
        elif each is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            expected += ["true", "false"]
        elif typing.get_origin(each) is tuple:
            with contextlib.suppress(ValueError):
                return tuple(int(part) for part in text.split(","))
            expected.append("whole numbers with commas between them")
        elif each in (int, float):
            with contextlib.suppress(ValueError):
                return each(text)
            expected.append("a whole number" if each is int else "a number")
    raise InputError(f"--policy {name}: {text!r}, expected {' or '.join(expected)}")


def write_json(file: str, value: Any) -> None:
    """Writes `value` to `file`, complete or not at all; - is standard output."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
        return
    path = Path(file)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
