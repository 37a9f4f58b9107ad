"""A machine's step costs on file, so that a run need not begin from a data sheet's guess.

JSON: {"model", "dtype", "device", "coefficients": [step, packed token, context token read, query-context pair]}, in
seconds. What matters to a scheduler is their proportions; every run goes on fitting (`costs.Fit`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from aspire_jax.checks import number
from aspire_jax.costs import TERMS, Fit
from aspire_jax.errors import InputError
from aspire_jax.loading import Model


def read(path: str | Path, model: Model) -> Fit:
    """A fit that begins where `path` left off.

    Raises:
      InputError: not a calibration, or one of another model, dtype or device.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}, expected a calibration") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: a {type(found).__name__}, expected a JSON object")
    for name, value in _about(model).items():
        if found.get(name) != value:
            raise InputError(f"{path}: {name}: {json.dumps(found.get(name))}, expected {json.dumps(value)}")
    b = found.get("coefficients")
    if not isinstance(b, list) or len(b) != TERMS or not all(number(x) and x > 0 for x in b):
        raise InputError(f"{path}: coefficients: {json.dumps(b)[:80]}, expected {TERMS} positive numbers")
    return Fit(np.asarray(b, np.float32))


def contents(fit: Fit, model: Model) -> dict[str, Any]:
    """What a calibration file of `fit` holds."""
    return {**_about(model), "coefficients": [float(x) for x in fit.coefficients]}


def _about(model: Model) -> dict[str, str]:
    return {"model": model.name, "dtype": model.dtype, "device": jax.devices()[0].device_kind}
