"""The environment of every test. Set before jax is first imported, and inherited by commands that tests start."""

from __future__ import annotations

import gc
import os
import random
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_REPO = Path(__file__).resolve().parent.parent

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could configure it (by a pytest plugin?)")

_DEVICES = "--xla_force_host_platform_device_count=4"

# What the tests mean. These are not defaults: an environment that says otherwise is overruled.
os.environ.update(
    JAX_PLATFORMS="cpu",  # GPU checks are separate scripts
    JAX_NUMPY_DTYPE_PROMOTION="strict",  # float32 that meets bfloat16 raises
    JAX_NUMPY_RANK_PROMOTION="raise",  # [D] that meets [B, D] raises
    XLA_FLAGS=" ".join(f for f in (os.environ.get("XLA_FLAGS", ""), _DEVICES) if f),  # four, for the shardings
    HF_HUB_OFFLINE="1",  # no test may need a network
    TOKENIZERS_PARALLELISM="false",  # otherwise it warns whenever a test forks
)

# Compiled programs outlive the run: most of a first run is XLA, and a second one finds it done.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_REPO / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


@pytest.fixture(autouse=True, scope="module")
def _seeds_repeat(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds that nobody chose are the same in every run of a module: what fails once fails again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "randbits", random.Random(request.node.name).getrandbits)
        yield


@pytest.fixture(autouse=True, scope="module")
def _release_programs() -> Iterator[None]:
    """Every compiled program holds memory mappings, and a process may have 65,530: hundreds of tests in one run out.

    Past that, compiling crashes the process.
    """
    yield
    if "jax" in sys.modules:
        import jax

        if "aspire_jax.programs" in sys.modules:
            sys.modules["aspire_jax.programs"]._compile.cache_clear()
        jax.clear_caches()
        gc.collect()
