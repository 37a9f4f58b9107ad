"""Memory of a conversion does not grow with the model (bench/convert_memory.py shows it at full size)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import convert_memory

SIZES = {"D_MODEL": 512, "D_FF": 1408, "HEADS": 8, "KV_HEADS": 2, "HEAD_DIM": 64, "VOCAB": 4000}


@pytest.mark.parametrize("route", ["to orbax", "and back"])
def test_peak_grows_with_the_largest_group_alone(route: str, tmp_path: Path, monkeypatch: Any) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(convert_memory, name, size)
    peaks = []
    for size in (0.0, 0.3):  # one layer, then 40 or so: 5 MiB and 300 MiB
        src = tmp_path / f"hf{size}"
        layers = convert_memory.write_checkpoint(src, size)
        row = convert_memory.convert(src, tmp_path / f"orbax{size}", route, "bfloat16", layers)
        if route == "and back":
            row = convert_memory.convert(
                tmp_path / f"orbax{size}", tmp_path / f"back{size}", route, "bfloat16", layers, "--to", "hf"
            )
        peaks.append(row)
    small, large = peaks
    assert large["model_gib"] > 0.25 and small["model_gib"] < 0.02
    allowed = 3 * large["largest_group_gib"] + 0.04
    assert large["peak_gib"] - small["peak_gib"] < allowed < large["model_gib"] / 4
    assert large["peak_gib"] < large["bound_gib"]
