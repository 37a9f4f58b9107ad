"""A trace whose bytes changed on the way is refused in one line, or is still a trace."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from aspire_jax import tracing
from aspire_jax.errors import InputError


@pytest.fixture
def file(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"meta": np.array(json.dumps({"format": 1}))}
    arrays |= {name: rng.integers(0, 9, (40, 3)).astype(np.int32) for name in ("ids", "tokens", "draft")}
    np.savez_compressed(tmp_path / "t.npz", **arrays)
    return tmp_path / "t.npz"


def test_changed_bytes(file):
    data, rng, said = file.read_bytes(), random.Random(1), set()
    for _ in range(300):
        damaged = bytearray(data[: rng.choice([len(data), rng.randrange(1, len(data))])])
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=str(file)) as caught:
            tracing.load(file)
        said.add(str(caught.value).partition("(")[2][:12])
    assert any(text.startswith("Error -3") for text in said) and len(said) > 5
