"""Memory of a conversion does not grow with the model (bench/convert_memory.py shows it at full size)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import convert_memory

SIZES = {"D_MODEL": 512, "D_FF": 1408, "HEADS": 8, "KV_HEADS": 2, "HEAD_DIM": 64, "VOCAB": 4000}


def test_peak_grows_with_the_largest_group_alone(tmp_path: Path, monkeypatch: Any) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(convert_memory, name, size)
    peaks: dict[str, list[dict[str, Any]]] = {"there": [], "back": []}
    for size in (0.0, 0.2):  # one layer and many: 5 MiB and 200 MiB
        hf, orbax, back = (tmp_path / f"{name}{size}" for name in ("hf", "orbax", "back"))
        layers = convert_memory.write_checkpoint(hf, size)
        peaks["there"].append(convert_memory.convert(hf, orbax, "there", "bfloat16", layers))
        peaks["back"].append(convert_memory.convert(orbax, back, "back", "bfloat16", layers, "--to", "hf"))
    for small, large in peaks.values():
        assert small["model_gib"] < 0.02 and large["model_gib"] > 0.18
        growth = large["peak_gib"] - small["peak_gib"]
        assert growth < 3 * large["largest_group_gib"] + 0.03 < large["model_gib"] / 3, (small, large)
        assert large["peak_gib"] < large["bound_gib"]
