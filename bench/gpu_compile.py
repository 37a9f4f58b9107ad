"""Compiles every kernel, and the whole decode loop of three models, for an H200 without one; fails on what must not be.

    make gpu-compile        (makes its own environment; Python 3.12)
    python -m bench.gpu_compile [--write] [--json FILE] [--only NAME ...]

No kernel may spill a register. No loop may copy the cache or a layer's weights, or need more than a bound of temporary
memory. Registers and shared memory are compared with the table in docs/gpu_kernels.md; `--write` renews it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import pallas_kernels as pk

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "gpu_kernels.md"
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"
# Temporaries of a decode loop: partial results of attention, logits, one layer's activations. Not a layer's weights.
MOST_TEMPORARY = 512 << 20
# Model, method, batch, context: the paper's batches for LB-v2[30k-40k].
LOOPS = [
    ("Qwen3-1.7B", "autoregressive", 18, 32_768),
    ("Qwen3-1.7B", "aspire", 18, 32_768),
    ("Qwen3-1.7B", "vegas", 18, 32_768),
    ("Qwen3-8B", "aspire", 12, 32_768),
    ("DeepSeek-R1-Distill-Llama-8B", "aspire", 14, 32_768),
]
OURS = {"attention_16", "attention_64", "attention_128", "combine_new", "combine_draft", "write_pages", "select_pages"}
OURS |= {"page_scores_max", "page_scores_mean"}
# Rows, most queries of each, KV heads, group, head_dim, listed pages, dtype, drafting.
ATTENTION = [
    (12, 1, 8, 4, 128, 2080, "bfloat16", False),
    (12, 1, 8, 4, 128, 146, "bfloat16", True),
    (12, 17, 8, 4, 128, 2080, "bfloat16", False),
    (18, 17, 8, 2, 128, 2080, "bfloat16", False),
    (1, 256, 8, 4, 128, 2080, "bfloat16", False),
    (8, 17, 4, 8, 128, 2080, "float16", False),
    (8, 17, 3, 3, 64, 512, "bfloat16", False),
    (8, 5, 8, 4, 96, 512, "bfloat16", False),
    (4, 1, 4, 1, 256, 512, "bfloat16", True),
    (4, 17, 4, 8, 256, 512, "bfloat16", False),
    (4, 17, 8, 4, 128, 512, "float32", False),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="renew the table in docs/gpu_kernels.md")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"jobs to run, of {', '.join(jobs())}")
    parser.add_argument("--job", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        Path(args.json).write_text(json.dumps(jobs()[args.job]()))
        return 0
    names = args.only or list(jobs())
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(names, pool.map(_in_process, names), strict=True))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
    problems = [problem for rows in results.values() for row in rows for problem in row["problems"]]
    table = _table([row for rows in results.values() for row in rows])
    print(table)
    if args.write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    elif not args.only:
        problems += _differences(table)
    for problem in problems:
        print(f"gpu_compile: error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def jobs() -> dict[str, Any]:
    """What can be compiled apart, each in a process of its own."""
    loops = {f"{model} {method}": functools.partial(loop, model, method, b, n) for model, method, b, n in LOOPS}
    return {**loops, "kernels": kernels, "prompt": prompt}


def _in_process(name: str) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-W", "ignore", "-m", "bench.gpu_compile", "--job", name, "--json", file.name]
        done = subprocess.run(command, capture_output=True, text=True, cwd=DOCUMENT.parent.parent)
        if done.returncode:
            return [{"case": name, "kernels": [], "problems": [f"{name}: {done.stderr.strip()[-2000:]}"]}]
        return json.loads(Path(file.name).read_text())


def _row(case: str, compiled: Any, ours: set[str] | None = None) -> dict[str, Any]:
    mine = [k for k in compiled.kernels if ours is None or _plain(k.name) in ours]
    problems = [f"{case}: kernel {k.name} spills {k.spilled} bytes" for k in compiled.kernels if k.spilled]
    if not mine:
        problems.append(f"{case}: no kernel of ours found, expected some")
    return {
        "case": case,
        # A kernel that is called in several places has several names, and often the same figures.
        "kernels": sorted({(_plain(k.name), k.threads, k.registers, k.shared) for k in mine}),
        "temporary": compiled.temporary,
        "problems": problems,
    }


def _plain(name: str) -> str:
    return re.sub(r"__\d+$", "", name)


def kernels() -> list[dict[str, Any]]:
    """Every kernel at production shapes."""
    from bench.gpu_target import Target

    target = Target()

    def run(case: str, function: Any, *arguments: Any, **jit: Any) -> dict[str, Any]:
        return _row(case, target.compile(function, *target.at_home(arguments), **jit))

    return [run(*job) for job in _attention_cases()] + [
        *(run(*job) for job in _score_cases()),
        run(
            "select: 12 rows, 146 of 2080 pages",
            functools.partial(pk.select_pages, capacity=146, implementation="triton"),
            _floats(12, 2080), _ints(12),
        ),
        run(
            "select: 12 rows, 1147 of 16384 pages",
            functools.partial(pk.select_pages, capacity=1147, implementation="triton"),
            _floats(12, 16_384), _ints(12),
        ),
        run(
            "write: 204 tokens, 36 layers",
            functools.partial(pk.write_pages, implementation="triton"),
            *[_floats(36, 8, 24_960, 16, 128, dtype="bfloat16")] * 2, *[_floats(36, 204, 8, 128, dtype="bfloat16")] * 2,
            _ints(204), _ints(204),
            donate_argnums=(0, 1),
        ),
    ]  # fmt: skip


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _lists(batch: int, pages: int) -> pk.PageLists:
    return pk.PageLists(_ints(batch, pages), _ints(batch, pages), _ints(batch))


def _attention_cases() -> Iterator[tuple[Any, ...]]:
    for batch, most, heads, group, dim, pages, dtype, drafts in ATTENTION:
        tokens, cache = batch * most, _floats(32, heads, batch * pages, 16, dim, dtype=dtype)
        new, tail = _floats(tokens, heads, dim, dtype=dtype), _floats(32, heads, batch, 16, dim, dtype=dtype)
        kind = f"{'draft' if drafts else 'verify'}: {batch} rows x {most}, group {group}, D {dim}"
        yield (
            f"{kind}, {dtype}, {16 * pages} keys",
            functools.partial(pk.mixed_attention, max_queries=most, implementation="triton"),
            _floats(tokens, heads, group, dim, dtype=dtype), cache, cache, _ints(), _lists(batch, pages),
            pk.QueryRows(_ints(batch), _ints(batch)),
            pk.Tail(new, new, tail, tail, _ints(batch)) if drafts else pk.NewTokens(new, new),
        )  # fmt: skip


def _score_cases() -> Iterator[tuple[Any, ...]]:
    for heads in ("max", "mean", "kv"):
        yield (
            f"scores: 12 rows, group 4, D 128, bfloat16, {heads}",
            functools.partial(pk.page_scores, heads=heads, implementation="triton"),
            _floats(12, 2, 8, 4, 128, dtype="bfloat16"), _floats(12, 2, 8, 4),
            _floats(36, 8, 24_960, 16, 128, dtype="bfloat16"), _ints(), _lists(12, 2080),
        )  # fmt: skip


def _engine(name: str, method: str, batch: int, context: int) -> tuple[Any, Any, Any]:
    """An engine of a model at full size; its weights and its state, abstract."""
    from aspire_jax import engine as engine_lib
    from aspire_jax import methods, params
    from aspire_jax.costs import TERMS, CostModel
    from bench.gpu_models import MODELS

    config = MODELS[name]
    engine = methods.configure(
        config, method, batch=batch, capacity=context + 512, max_new=512, dtype="bfloat16", implementation="pallas",
        platform="gpu",
    )  # fmt: skip
    state = jax.eval_shape(functools.partial(engine_lib.init, engine), CostModel(_floats(TERMS)))
    return engine, params.abstract(config, jnp.bfloat16), state


def _program(case: str, function: Any, made: tuple[Any, Any, Any], *arguments: Any) -> dict[str, Any]:
    """A program of (engine, params, state, ...), and what is wrong with it."""
    from aspire_jax import programs
    from bench.gpu_target import Target

    target, (engine, weights, state) = Target(), made
    compiled = target.compile(
        function, engine, *target.at_home((weights, state, *arguments)), options=programs.compiler_options(engine),
        static_argnums=0, donate_argnums=2,
    )  # fmt: skip
    row = _row(case, compiled, OURS)
    row["problems"] += [f"{case}: {problem}" for problem in _copies(compiled, state, weights)]
    row["problems"] += [f"{case}: {problem}" for problem in _graphs(compiled, programs.LAUNCH)]
    if compiled.temporary > MOST_TEMPORARY:
        most = MOST_TEMPORARY >> 20
        row["problems"].append(f"{case}: {compiled.temporary >> 20} MiB of temporaries, expected at most {most}")
    return row


def loop(name: str, method: str, batch: int, context: int) -> list[dict[str, Any]]:
    """The decode loop of a model at full size, from abstract params."""
    from aspire_jax import step

    case = f"loop: {name}, {method}, {batch} x {context}"
    return [_program(case, step.run, _engine(name, method, batch, context), _ints(), _ints())]


def prompt() -> list[dict[str, Any]]:
    """What admits a prompt: a chunk of prefill, and the pass over its end that `magicdec-snapkv` asks for."""
    from aspire_jax import observation, prefill
    from aspire_jax.host import CHUNK

    made = _engine("Qwen3-8B", "magicdec-snapkv", 12, 32_768)
    window = made[0].plan.prompt_window
    observed = _program("prompt: its end", observation.observe_prompt, made, _ints(), _ints(window), _ints())
    # Plain XLA, of which our kernels are no part.
    observed["problems"] = [problem for problem in observed["problems"] if "no kernel of ours" not in problem]
    chunk = (_ints(), _ints(CHUNK), _ints(), _ints())
    return [_program(f"prompt: Qwen3-8B, {CHUNK} tokens", prefill.prefill, made, *chunk), observed]


def _graphs(compiled: Any, launch: str) -> Iterator[str]:
    """Whether what the library decided about CUDA graphs reached the compiler."""
    if (compiled.graphs > 0) != (launch == "on"):
        yield f"{compiled.graphs} CUDA graphs, expected command buffers {launch}"


def _shape(x: Any, layers: bool = True) -> str:
    """As XLA writes it; of one layer unless `layers`."""
    return f"bf16[{','.join(str(n) for n in (x.shape if layers else (1, *x.shape[1:])))}]"


def _copies(compiled: Any, state: Any, weights: Any) -> Iterator[str]:
    """What is copied and must not be: the cache, wherever it is; a layer's weights, into temporary memory."""
    cache = _shape(state.cache.k)
    passes_on = {"parameter", "get-tuple-element", "bitcast", "custom-call", "tuple", "while", "conditional"}
    for opcode in re.findall(rf"= {re.escape(cache)}\S* ([\w-]+)\(", compiled.text):
        if opcode not in passes_on:
            yield f"{opcode} makes another cache {cache}"
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    if compiled.aliased < held:
        yield f"{compiled.aliased} bytes are updated in place, expected the cache's {held} at least"
    temporary = compiled.memory.split("Memory Space")[-1]
    # The last parts of the report are temporaries; the parameters before them have all layers.
    for weight, x in weights["layers"].items():
        if x.ndim > 2 and _shape(x, layers=False) in temporary:
            yield f"a layer's {weight} {_shape(x, layers=False)} is copied"


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"jax {jax.__version__}, {_target_name()}, autotuning off",
        "",
        "| program | kernel | threads | registers | shared memory, bytes | temporaries, MiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        for i, (name, threads, registers, shared) in enumerate(row["kernels"]):
            # A program's temporaries have a bound; their exact size moves with every change of the engine.
            size = "" if row["case"].startswith(("loop", "prompt")) else f"{row['temporary'] / 2**20:.1f}"
            first = (row["case"], size) if i == 0 else ("", "")
            lines.append(f"| {first[0]} | {name} | {threads} | {registers} | {shared} | {first[1]} |")
    return "\n".join(lines)


def _target_name() -> str:
    from bench.gpu_target import ARCHITECTURE

    return f"NVIDIA H200 ({ARCHITECTURE})"


def _differences(table: str) -> list[str]:
    """Lines that differ from the table kept in docs."""
    kept = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    now = table.splitlines()
    lost = [f"docs/gpu_kernels.md has, and it is no longer so: {line}" for line in kept if line not in now]
    return lost + [f"docs/gpu_kernels.md lacks: {line}" for line in now if line not in kept]


if __name__ == "__main__":
    sys.exit(main())
