"""The search over context policies: what it counts, how it chooses, and that its shares are data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import ModelConfig
from aspire_jax.context import BlendContext, Room, Scores
from bench import context_search_report
from bench.context_family import Tuned, baselines, page_size, ratio, summary, verifications
from bench.context_search import search, stages

CONFIG = ModelConfig(
    family="llama",
    vocab_size=61,
    d_model=16,
    n_layers=4,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    d_ff=16,
    norm_eps=1e-5,
    max_length=512,
    tie_embeddings=True,
)


def test_verifications_of_an_answer() -> None:
    """The first held no drafts, the last may be cut short; of the others one held 16 and emitted 4, one held 7."""
    tokens = np.arange(30)
    held = np.full(30, -1)
    held[[0, 1, 5, 13, 14]] = (0, 16, 16, 7, 16)
    assert verifications(tokens, held) == [(3, True), (7, True)]
    looping = np.tile(np.arange(5), 6)
    assert [novel for _, novel in verifications(looping, held)] == [False, False]


def test_summary_counts_novel_ones_apart() -> None:
    found = summary([[(4, True), (16, False)], [(2, True), (0, True)]])
    assert found["all"]["mean"] == 22 / 4
    assert found["novel"]["mean"] == 2
    assert (found["all"]["verifications"], found["novel"]["verifications"]) == (4, 3)
    assert found["novel"]["by_prompt"] == [[4, 1], [2, 2]]
    # Two prompts with means 4 and 1, drawn with replacement: 4, 6/3, 1 with probabilities 1/4, 1/2, 1/4.
    assert abs(found["novel"]["standard_error"] - np.std([4, 2, 2, 1])) < 0.05


def test_summary_of_nothing() -> None:
    assert summary([[], []])["novel"]["mean"] == 0


def test_ratio_is_paired() -> None:
    """Every prompt accepts twice as much: the interval has no width, however much prompts differ."""
    one = summary([[(1, True)] * 3, [(8, True)] * 3])
    two = summary([[(2, True)] * 3, [(16, True)] * 3])
    assert ratio(two, one) == [2.0, 2.0, 2.0]


def test_search_keeps_the_best_value_of_each_setting() -> None:
    asked = []

    def evaluate(name: str, policy: Any) -> dict[str, Any]:
        asked.append(policy)
        score = 3.0 * (policy.layers == (10,)) - abs(policy.own - 0.75) - abs(policy.window - 0.25)
        score += (policy.heads == "max") + (policy.renew == "step")
        return {kind: {"mean": score} for kind in ("all", "novel")}

    best, tried = search(evaluate, Tuned(rho=0.0, least=512, renew="step"), 30)
    assert (best.layers, best.own, best.window, best.heads, best.renew) == ((10,), 0.75, 0.25, "max", "step")
    assert len(tried) == len(asked) == sum(len(values) for _, values in stages(30))
    for policy in asked:
        policy.plan(dataclasses.replace(CONFIG, n_layers=30))


def test_shares_and_budget_as_data_choose_what_fields_would() -> None:
    room, lengths = Room(40, 4, 32, 16), jnp.asarray([150, 90], jnp.int32)
    mass = jax.random.uniform(jax.random.key(0), (4, 2, 40))
    scores = Scores((0, 1, 2, 3), mass, jnp.ones((4, 2), bool), lengths)
    for own, window, least in ((0.0, 0.1, 64), (0.5, 0.5, 96), (1.0, 0.25, 80)):
        fields: dict[str, Any] = {"rho": 0.0, "own": own, "window": window, "least": least, "sinks": 4}
        plain = BlendContext(**fields)
        want = plain.select(plain.observe(plain.init(CONFIG, 2, room), scores), lengths, room)
        tuned = Tuned(**fields | {"own": 0.5, "window": 0.125, "least": 96})
        state = tuned.observe(tuned.init(CONFIG, 2, room), scores)
        state = state.replace(own=jnp.float32(own), window=jnp.float32(window), tokens=jnp.int32(least))
        got = tuned.select(state, lengths, room)
        for a, b in zip(np.asarray(got).reshape(8, -1), np.asarray(want).reshape(8, -1), strict=True):
            assert set(a[a >= 0]) == set(b[b >= 0])


def test_baselines_read_the_budget() -> None:
    room = Room(512, 16, 64, 16)
    for budget in (64, 256, 512):
        policies = baselines(budget)
        sizes = {name: policy.capacity(room) * 16 for name, policy in policies.items() if page_size(policy) == 16}
        assert sizes["refresh layer N-2"] == sizes["streaming"] == budget
        assert budget <= sizes["vegas"] <= budget + 48  # and what was committed since it was scored
        tokens = policies["vegas, single tokens"]
        assert tokens.capacity(room._replace(pages=8192, page_size=page_size(tokens))) == budget + 17


def test_markdown_names_the_best_and_the_ratio() -> None:
    found = summary([[(4, True), (16, False)]])
    best = Tuned(layers=(20,), own=0.25)
    rows = [
        {"name": "best blend", "budget": 512, "against_reference": [1.5, 1.2, 1.8], **found},
        {"name": "refresh layer N-2", "budget": 512, **found},
    ]
    tried = [{"setting": "own", "value": v, "policy": best, **summary([[(a, True)]])} for v, a in ((0.0, 1), (0.25, 3))]
    results = context_search_report.plain(
        {
            "command": "python -m bench.context_search",
            "drafts": 16,
            "context": 7000,
            "seed": 0,
            "max_tokens": 96,
            "minutes": 3.2,
            "prompts": 8,
            "budget": 512,
            "search": {"baselines": [{"name": "vegas", **found}], "tried": tried, "best": best},
            "report": {"rows": rows, "answers_that_differ": 0},
        }
    )
    text = context_search_report.markdown(results)
    assert "| best blend | 512 | 10.00 ± 0.00 (2) | 4.00 ± 0.00 (1) | 1.50 (1.20 to 1.80) |" in text
    assert "| `own` | **0.25** | 3.00 ± 0.00 (1) | **3.00 ± 0.00 (1)** |" in text
    assert "layers=(20,)" in text
