"""JSONL files for the command line, and the arguments that keep its engine small."""

from __future__ import annotations

import json
from pathlib import Path

# One engine for most of these tests: drafting with few step shapes, one slot, the model's whole length.
SMALL = ("--slots", "1", "--max-tokens", "40", "--policy", "d_max=3", "--policy", "gamma_init=2")
SMALL = (*SMALL, "--policy", "k_min=2", "--policy", "recent=1")


def write_lines(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def prompts(path: Path, count: int = 7) -> Path:
    """Prompts of different lengths, none of which fits into half of the model's length."""
    texts = ["def f(x):\n    return x\n" * (2 + i % 3) for i in range(count)]
    return write_lines(path, *({"id": f"p{i}", "prompt": text} for i, text in enumerate(texts)))
