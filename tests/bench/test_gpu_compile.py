"""What bench.gpu_compile objects to, shown on programs made up for it; compiling is `make gpu-compile`'s."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from aspire_jax.cache import KVCache
from bench import gpu_compile
from bench.gpu_target import Compiled, Kernel, _kernels

CACHE = jax.ShapeDtypeStruct((4, 2, 8, 16, 32), jnp.bfloat16)
WEIGHTS = {"layers": {"down": jax.ShapeDtypeStruct((4, 96, 64), jnp.bfloat16)}}
HELD = 2 * CACHE.size * 2
IN_PLACE = "%a = bf16[4,2,8,16,32]{4,3,2,1,0} get-tuple-element(%p), index=1\n"


class State:
    cache = KVCache(CACHE, CACHE)


def compiled(text: str = IN_PLACE, aliased: int = HELD, memory: str = "", kernels: tuple[Kernel, ...] = ()) -> Compiled:
    return Compiled(kernels, 0, aliased, text, "Memory Space: default\n" + memory, "")


def objections(program: Compiled) -> list[str]:
    return list(gpu_compile._copies(program, State(), WEIGHTS))


def test_a_loop_in_place_passes() -> None:
    assert objections(compiled()) == []


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (compiled(IN_PLACE + "%b = bf16[4,2,8,16,32]{4,3,2,1,0} copy(%a)\n"), "copy makes another cache"),
        (compiled("%b = bf16[4,2,8,16,32]{4,3,2,1,0} fusion(%a), kind=kLoop"), "fusion makes another cache"),
        (compiled(aliased=HELD - 1), "bytes are updated in place, expected the cache's"),
        (compiled(memory="  12.00KiB; 2\u00d7bf16[1,96,64], f32[3]"), "a layer's down bf16[1,96,64] is copied"),
    ],
)
def test_copies_are_named(program: Compiled, message: str) -> None:
    (objection,) = objections(program)
    assert message in objection


@pytest.mark.parametrize(("graphs", "launch", "found"), [(7, "on", 0), (0, "off", 0), (0, "on", 1), (3, "off", 1)])
def test_cuda_graphs_are_as_the_library_decides(graphs: int, launch: str, found: int) -> None:
    program = dataclasses.replace(compiled(), graphs=graphs)
    assert len(list(gpu_compile._graphs(program, launch))) == found


def test_spills_are_named_and_equal_calls_count_once() -> None:
    fine = [Kernel(name, 64, 0, 1024, 128) for name in ("attention_16", "attention_16__1")]
    row = gpu_compile._row(
        "case", compiled(kernels=(*fine, Kernel("combine_new__3", 255, 8, 0, 128))), {"attention_16"}
    )
    assert row["kernels"] == [("attention_16", 128, 64, 1024)]
    assert row["problems"] == ["case: kernel combine_new__3 spills 8 bytes"]
    assert gpu_compile._row("case", compiled())["problems"] == ["case: no kernel of ours found, expected some"]


def test_the_table_is_compared_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "gpu_kernels.md"
    document.write_text(f"before\n{gpu_compile.BEGIN}\n| a | 1 |\n| b | 2 |\n{gpu_compile.END}\n")
    monkeypatch.setattr(gpu_compile, "DOCUMENT", document)
    assert gpu_compile._differences("| a | 1 |\n| b | 2 |") == []
    lost, found = gpu_compile._differences("| a | 1 |\n| b | 3 |")
    assert lost.endswith("| b | 2 |")
    assert found.endswith("| b | 3 |")


def test_registers_and_shared_memory_come_from_the_assembler_and_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.ptx").write_text("")
    said = (
        "ptxas info    : Compiling entry function 'attention_16' for 'sm_90a'\n"
        "    24 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 107 registers, used 1 barriers\n"
    )

    class Done:
        stdout, stderr = "", said

    def run(*args: Any, **options: Any) -> Done:
        return Done()

    monkeypatch.setattr("bench.gpu_target.ptxas", lambda: "ptxas")
    monkeypatch.setattr("bench.gpu_target.subprocess.run", run)
    thunks = (
        "001: kCustomKernel [source | sink] attention_16 grid: [12, 8, 11] threads: [128, 1, 1]  shared_memory: 39680 b"
    )
    assert _kernels(tmp_path, thunks) == (Kernel("attention_16", 107, 16, 39680, 128),)


def test_the_kept_table_has_every_program() -> None:
    """Which figures stand there, only `make gpu-compile` can tell; that none is missing, anyone."""
    kept = gpu_compile.DOCUMENT.read_text().partition(gpu_compile.BEGIN)[2].partition(gpu_compile.END)[0]
    for model, method, batch, context in gpu_compile.LOOPS:
        assert f"| loop: {model}, {method}, {batch} x {context} |" in kept
    for case, *_ in (*gpu_compile._attention_cases(), *gpu_compile._score_cases()):
        assert f"| {case} |" in kept
