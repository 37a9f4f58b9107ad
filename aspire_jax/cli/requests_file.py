"""Reads prompts from a JSONL file. Whatever is wrong with it is one line that names file, line and field."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aspire_jax.errors import InputError

if TYPE_CHECKING:
    from aspire_jax.request import Request


class _Refused(ValueError):
    """A line that JSON allows and this format does not."""


def read(path: str | Path) -> tuple[list[Request], list[str], str]:
    """The file's requests, the place of each ("in.jsonl:3"), and a digest of them that a resumed run compares.

    Blank lines are skipped.

    Raises:
      InputError: names file, line, field, value and what was expected.
    """
    from aspire_jax.request import from_mapping

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, expected a JSONL file") from error
    requests, places, digest = [], [], hashlib.sha256()
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        fields = parse(line, where)
        if fields.get("id") is None:
            found = "null" if "id" in fields else "missing"
            raise InputError(f"{where}: id: {found}, expected a string or a whole number")
        requests.append(from_mapping(fields, where))
        places.append(where)
        digest.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
    if not requests:
        raise InputError(f"{path}: no lines, expected at least one prompt")
    return requests, places, digest.hexdigest()


def parse(line: bytes, where: str) -> dict[str, Any]:
    """One line as a JSON object; numbers that JSON does not know and fields given twice are refused.

    Raises:
      InputError: begins with `where`.
    """
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: byte {error.start + 1} is not UTF-8, expected a JSON object in UTF-8") from error
    except _Refused as error:
        raise InputError(f"{where}: {error}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg} at column {error.colno}), expected a JSON object") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise InputError(f"{where}: not JSON that can be read ({error}), expected a JSON object") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: a JSON {type(value).__name__}, expected an object")
    return value


def _no_constant(text: str) -> Any:
    raise _Refused(f"{text} is not JSON, expected a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"{twice}: given twice, expected once")
    return fields
