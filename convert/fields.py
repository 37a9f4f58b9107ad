"""Typed access to a config somebody else wrote: every complaint names file, field, value and expectation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aspire_jax.errors import InputError


class Fields:
    """Reads fields of the mapping `values`, which came from `file`. A null counts as absent."""

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file, self.values, self.prefix = file, values, prefix

    def fail(self, key: str, expected: str) -> InputError:
        """The error for the value of `key`; the caller raises it."""
        if self.values.get(key) is None:
            return InputError(f"{self.file}: field {self.prefix}{key} is missing, expected {expected}")
        return InputError(f"{self.file}: {self.prefix}{key} is {self.values[key]!r}, expected {expected}")

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self.values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, "a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.values.get(key)
        value = default if value is None else value
        bad = isinstance(value, bool) or not isinstance(value, int | float)
        if bad or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
            raise self.fail(key, "a positive number")
        return float(value)  # type: ignore[arg-type]

    def optional_number(self, key: str) -> float | None:
        """A positive finite number, or None where absent."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty where absent."""
        value = self.values.get(key)
        value = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value):
            raise self.fail(key, "a token id or a list of token ids")
        return tuple(value)

    def refuse(self, key: str, supported: Any, what: str) -> None:
        """Raises InputError where `key` is present and is not `supported`."""
        value = self.values.get(key)
        if value is not None and value != supported:
            raise InputError(f"{self.file}: {self.prefix}{key} is {value!r}: {what} is not supported")


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
