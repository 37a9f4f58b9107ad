"""Draft-length policies without an engine: views and outcomes by hand, decisions as letters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax.draft_length import DRAFT, IDLE, VERIFY, DraftLengthPolicy, Outcome, View
from aspire_jax.shapes import Shapes
from aspire_jax.signals import unknown

from . import tiny

B, BLOCK, CAPACITY, LAYERS = 4, 16, 4096, 32
ACTION = {DRAFT: "D", VERIFY: "V", IDLE: "-"}


def shapes(d_max: int, **fields: Any) -> Shapes:
    base = {"batch": B, "d_max": d_max, "capacity": CAPACITY, "block": BLOCK, "dense": False, "mixed": True}
    return Shapes(**{**base, "refreshes": 1 / LAYERS, **fields})


def view(d_max: int, prices: Iterable[float] = tiny.COST, **fields: Any) -> View:
    base: dict[str, Any] = {
        "active": [True] * B,
        "drafted": [0] * B,
        "limit": [d_max] * B,
        "lengths": [1024] * B,
        "selected": [128.0] * B,
        "idle": 0,
    }
    of_shapes = {k: fields.pop(k) for k in ("dense", "mixed") if k in fields}
    arrays = {k: jnp.asarray(v) for k, v in {**base, **fields}.items()}
    arrays["selected"] = arrays["selected"].astype(jnp.float32)
    return View(**arrays, cost=tiny.cost(*prices), shapes=shapes(d_max, **of_shapes))


def decide(policy: DraftLengthPolicy, state: Any, v: View) -> str:
    """Actions as letters: D drafts, V verifies, - waits."""
    static = v.shapes

    @jax.jit
    def f(state: Any, arrays: Any) -> jax.Array:
        return policy.decide(state, View(*arrays, shapes=static))

    action = f(state, tuple(v)[:-1])
    assert action.dtype == jnp.int32
    return "".join(ACTION[int(a)] for a in action)


def outcome(**fields: Any) -> Outcome:
    base: dict[str, Any] = {
        "verified": [False] * B,
        "drafts": [0] * B,
        "accepted": [0] * B,
        "emitted": [0] * B,
        "drafted": [False] * B,
        "token": [-1] * B,
        "seconds": np.float32(1),
        "plain_seconds": np.float32(1),
        "active": [True] * B,
    }
    known = fields.pop("signals", unknown(B))
    return Outcome(**{k: jnp.asarray(v) for k, v in {**base, **fields}.items()}, signals=known)
