"""Checks of what a user gives: every refusal is one line that names the place, the field, the value and the rule."""

from __future__ import annotations

import json
import math
import numbers
from typing import Any

import numpy as np

from aspire_jax.errors import InputError


def whole(value: Any) -> bool:
    """Whether it is a whole number, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def number(value: Any) -> bool:
    """Whether it is a finite number, and not a bool."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def encodable(text: str) -> bool:
    """Whether it is text: JSON can spell half a surrogate pair, which is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check(good: bool, where: str, field: str, value: Any, expected: str) -> None:
    """Raises the refusal unless `good`."""
    if not good:
        raise refuse(where, field, value, expected)


def refuse(where: str, field: str, value: Any, expected: str) -> InputError:
    """The refusal, for the caller to raise. `where` -- says that the field is an option of a command line."""
    shown = json.dumps(value, default=repr)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    place = f"--{field.replace('_', '-')}" if where == "--" else f"{where}: {field}"
    return InputError(f"{place}: {shown}, expected {expected}")
