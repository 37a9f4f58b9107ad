"""The engine with the GPU kernels, interpreted: the tokens are those of plain greedy decoding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import engine as eng
from aspire_jax import methods, programs, step
from aspire_jax.attention.pallas import unserved
from aspire_jax.context import BlendContext, VegasContext
from aspire_jax.costs import TERMS, CostModel
from aspire_jax.draft_length import FixedDraftLength
from aspire_jax.forward import segments
from aspire_jax.shapes import Shape
from tests.pallas_kernels.cuda import lowered

from . import tiny
from .tiny import Request

KERNELS: dict[str, Any] = {"implementation": "pallas", "interpret": True, "unrolled": False, "dense": False}
DEEP = tiny.config(layers=3)
ENGINES = {
    # Two layers go under the scan, the refresh layer behind it stands alone; page tables are shuffled.
    "mixed": tiny.aspire(DEEP, in_step=False, renew="step", layers=(2,), consecutive=False, **KERNELS),
    # Every layer is scored and has selections of its own for each KV head; some are made within the step.
    "in step": tiny.make(
        tiny.config("qwen3", heads=4, kv=2, qk_norm=True, head_dim=20),
        BlendContext(rho=0.2, least=8, sinks=1, heads="kv"),
        FixedDraftLength(gamma=2),
        mixed=False,
        **KERNELS,
    ),
    "plain": tiny.make(DEEP, **KERNELS),
}
NEW = 16
PROMPTS = tiny.prompts((1, 2, 13, 40, 7, 30))


@pytest.mark.parametrize("name", list(ENGINES))
def test_tokens_equal_plain_decoding(name: str) -> None:
    """Six requests on four slots, so that two slots are taken over while the others go on."""
    engine = ENGINES[name]
    truth = tiny.greedy(engine.config, PROMPTS, NEW)
    answers, state = tiny.serve(engine, [Request(p, NEW) for p in PROMPTS])
    tiny.assert_same(answers, truth)
    assert all(len(a.tokens) == NEW for a in answers)
    for a, t in zip(answers, truth, strict=True):
        np.testing.assert_allclose(a.margins[:1], t.margins[:1], atol=tiny.TIE)
    if engine.d_max:
        assert sum(a.accepted for a in answers) >= 6
        assert sum(a.drafted - a.accepted for a in answers) >= 1
        assert state.compact.k.size == 0  # selected pages are read where they lie
        steps = dict(zip(engine.shapes.all, np.asarray(state.shape_steps).tolist(), strict=True))
        assert steps[Shape("draft", 4, 1)] > 0
        assert all(shape.kind != "dense" for shape in steps)


def test_rows_mix_and_layers_are_scanned_with_kernels() -> None:
    sizes = {"batch": 2, "capacity": 64, "max_new": 8}
    engine = methods.configure(DEEP, "aspire", implementation="pallas", platform="gpu", **sizes)
    assert (engine.mixed, engine.unrolled, engine.dense, engine.interpret) == (True, False, False, False)
    assert engine.context.renew == "step"
    assert methods.configure(DEEP, "aspire", platform="gpu", **sizes) == engine
    on_a_cpu = methods.configure(DEEP, "aspire", **sizes)
    assert (on_a_cpu.implementation, on_a_cpu.mixed, on_a_cpu.unrolled) == ("xla", False, True)
    assert methods.configure(DEEP, "aspire", implementation="xla", platform="gpu", **sizes) == on_a_cpu


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"implementation": "cuda"}, "implementation: 'cuda', expected None, 'xla' or 'pallas'"),
        ({"implementation": "pallas"}, "implementation: 'pallas' cannot serve this engine: the platform is cpu"),
        ({"implementation": "pallas", "unrolled": True}, "the platform is cpu, expected a CUDA GPU"),
        ({"implementation": "pallas", "platform": "gpu", "unrolled": True}, "the kernels take a stacked cache"),
        ({"implementation": "pallas", "platform": "gpu", "reproducible": True}, "not the same to the last bit"),
    ],
)
def test_an_explicit_choice_that_cannot_be_served_raises(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.configure(DEEP, "aspire", batch=2, capacity=64, max_new=8, **fields)


def test_the_library_decides_how_kernels_are_launched() -> None:
    """By one constant, and explicitly: what XLA_FLAGS says of it does not count. Plain XLA has no such options."""
    sizes = {"batch": 2, "capacity": 64, "max_new": 8}
    kernels = methods.configure(DEEP, "aspire", platform="gpu", **sizes)
    flag = "xla_gpu_enable_command_buffer"
    assert programs.compiler_options(kernels)[flag] == programs.COMMAND_BUFFERS[programs.LAUNCH]
    assert programs.compiler_options(kernels, "off")[flag] == ""
    assert "CUSTOM_CALL" in str(programs.compiler_options(kernels, "on")[flag])
    assert programs.compiler_options(methods.configure(DEEP, "aspire", **sizes)) == {}
    assert programs.compiler_options(ENGINES["mixed"]) == {}  # interpreted


def test_what_the_kernels_cannot_hold() -> None:
    assert unserved(tiny.config(heads=32, kv=1), "gpu", False) == "32 query heads share a KV head, expected at most 16"
    assert unserved(tiny.config(head_dim=512), "gpu", True) == "head_dim is 512, expected at most 256"
    assert unserved(DEEP, "gpu", False) is None
    with pytest.raises(ValueError, match="unrolled: True, expected False with implementation 'pallas'"):
        tiny.make(DEEP, implementation="pallas")


def loop_for_cuda(engine: eng.Engine) -> str:
    weights = tiny.params.abstract(engine.config, jnp.bfloat16)
    cost = CostModel(jax.ShapeDtypeStruct((TERMS,), jnp.float32))
    state = jax.eval_shape(functools.partial(eng.init, engine), cost)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return lowered(step.run, engine, weights, state, number, number, static_argnums=0, donate_argnums=2)


def test_the_decode_loop_lowers_for_cuda() -> None:
    """Triton's front end takes every kernel as the loop calls it; each shape's layers call the same few."""
    text = loop_for_cuda(
        tiny.aspire(DEEP, in_step=False, renew="step", layers=(2,), dtype="bfloat16", **KERNELS | {"interpret": False})
    )
    for kernel in ("attention_16", "combine_draft", "combine_new", "page_scores_max", "select_pages", "write_pages"):
        assert f'name = "{kernel}"' in text


@pytest.mark.parametrize(
    ("measured", "alone", "runs"),
    [
        (set(), set(), [(0, 6)]),
        (set(range(6)), set(), [(0, 6)]),
        ({4}, {4}, [(0, 4), (4, 5), (5, 6)]),
        ({1, 2, 3}, {2}, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6)]),
        ({0, 5}, set(), [(0, 1), (1, 5), (5, 6)]),
    ],
)
def test_layers_that_do_the_same_are_one_run(measured: set[int], alone: set[int], runs: list[tuple[int, int]]) -> None:
    assert segments(6, measured, alone, unrolled=False) == runs
    assert segments(6, measured, alone, unrolled=True) == [(0, 6)]


def test_a_policy_that_measures_every_layer_makes_no_larger_program() -> None:
    """Measured layers go through the loop too: one call of the kernel in each shape that verifies."""
    fields = {"mixed": False, "dtype": "bfloat16", **KERNELS, "interpret": False}
    engine = tiny.make(tiny.config(layers=5), VegasContext(), FixedDraftLength(gamma=2), **fields)
    text = loop_for_cuda(engine)
    verifying = [shape for shape in engine.shapes.all if shape.kind == "packed"]
    assert text.count('name = "page_scores_mean"') == len(verifying) > 1
