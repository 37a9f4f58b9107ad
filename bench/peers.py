"""The same weights, prompts, lengths and threads here, through transformers with torch, and through llama.cpp.

    python -m bench.peers [--data FILE ...] [--json FILE] [--plot FILE] [--quick]

Greedy answers of a fixed length; decoding and prefill apart. All prompts of a batch have one length, so that nobody
pads. The programs take turns, seed by seed, in one process with the same threads; a seed chooses the prompts. Whether
all answers are alike is checked against AutoRegressive here: a difference is explained where its two best logits there
lie closer than the precision of that program tells apart. What is not installed is left out by name.

transformers' prompt lookup decoding takes one row at a time and has no figure for larger batches.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aspire_jax.cli import allocator
from aspire_jax.cli.setup import positive
from aspire_jax.errors import InputError
from bench import command, peers_llama_cpp, peers_transformers, plots, spread

REFERENCE = "autoregressive"
# How close two best logits must lie for a program to exchange them: another order of summation in float32 (more layers
# of it than `comparing.NEAR_TIE` is for: other products, other attention), and float16 weights, keys and values.
EXPLAINED = {"float32": 5e-3, "float16": 0.3}

Answers = list[list[int]]
# Answers, seconds of prefill, seconds of decoding.
Generate = Callable[[Sequence[np.ndarray], int], tuple[Answers, float, float]]


def main() -> int:
    allocator.settle()
    return command.run(parser(), measure, draw, passed=passed)


def passed(results: Mapping[str, Any]) -> bool:
    """Whether every difference between answers is explained."""
    return not results["unexplained"]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command.parser(
        "peers", __doc__, quick="one context of 512 tokens, 1 seed, 16 tokens", plot="decode and prefill speeds"
    )
    made.add_argument("--model", default="smollm2-135m", help="a converted folder or an alias")
    made.add_argument(
        "--gguf", metavar="FILE", help="the same model for llama.cpp (default: what the alias is made of)"
    )
    made.add_argument("--data", nargs="+", default=[], metavar="FILE", help="prompts (see bench/datasets.py)")
    made.add_argument("--methods", nargs="+", default=[REFERENCE, "aspire"], metavar="NAME", help="of this library")
    made.add_argument("--contexts", nargs="+", type=positive, metavar="N", help="tokens (default: 2000 7000)")
    made.add_argument("--batches", nargs="+", type=positive, metavar="B", help="prompts at a time (default: 1 4)")
    made.add_argument("--seeds", type=positive, help="how many (default: 3)")
    made.add_argument("--max-tokens", type=positive, help="tokens of each answer (default: 64)")
    made.add_argument("--threads", type=int, help="for everyone (default: all cores of this process)")
    return made


def measure(args: argparse.Namespace, say: command.Say) -> dict[str, Any]:
    """All contexts and batch sizes."""
    threads = _threads(args.threads)
    # After the threads are set: XLA counts the cores of the process when it starts.
    from aspire_jax import load
    from aspire_jax.cli.setup import use_compile_cache
    from bench import machine
    from bench.peers_here import Here

    contexts = args.contexts or ([512] if args.quick else [2000, 7000])
    seeds, new = args.seeds or (1 if args.quick else 3), args.max_tokens or (16 if args.quick else 64)
    use_compile_cache()
    loaded = load(args.model, dtype="float32")
    results: dict[str, Any] = {"model": loaded.name, "machine": machine.describe(), "threads": threads, "seeds": seeds}
    results |= {"max_tokens": new, "rates": machine.rates(), "versions": {}, "left_out": {}, "cells": []}
    with tempfile.TemporaryDirectory() as folder:
        others = _others(args, Path(folder), threads, results)
        for name, why in results["left_out"].items():
            say(f"left out: {name}: {why}")
        for context in contexts:
            for batch in args.batches or [1, 4]:
                here = Here(loaded, args.data, args.methods, context=context, batch=batch, new=new, seeds=seeds)
                cell = _cell(here, others, seeds, new)
                results["cells"].append(cell)
                say.keep(results)
                say(_text(cell))
    results["rates_after"] = machine.rates()
    results["unexplained"] = [
        f"{row['program']} at {cell['batch']} x {cell['context']}"
        for cell in results["cells"]
        for row in cell["programs"]
        if row["unexplained"]
    ]
    return results


def _threads(wanted: int | None) -> int:
    """Confines the process to as many cores as threads are wanted, where the system can; returns their number."""
    if not hasattr(os, "sched_getaffinity"):
        return wanted or os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if wanted is not None:
        if not 1 <= wanted <= len(cores):
            raise InputError(f"--threads: {wanted}, expected 1 to {len(cores)}")
        os.sched_setaffinity(0, cores[:wanted])
    return wanted or len(cores)


def _others(
    args: argparse.Namespace, folder: Path, threads: int, results: dict[str, Any]
) -> dict[str, tuple[str, Generate]]:
    """The other programs that can run: precision and `generate` by name."""
    from aspire_jax.loading import find
    from convert import aliases, to_huggingface

    out: dict[str, tuple[str, Generate]] = {}
    if why := peers_transformers.missing():
        results["left_out"]["transformers"] = why
    else:
        to_huggingface.to_hf(find(args.model), folder / "hf", dtype="float32")
        torch_model = peers_transformers.Transformers(folder / "hf", threads=threads)
        results["versions"]["transformers"] = torch_model.version
        out["transformers"] = ("float32", torch_model.generate)
        out["transformers, prompt lookup"] = (
            "float32",
            lambda prompts, new: torch_model.generate(prompts, new, lookup=True),
        )
    source = Path(args.gguf) if args.gguf else None
    if source is None and args.model in aliases.ALIASES:
        source = aliases.gguf_path(args.model)
    if why := peers_llama_cpp.missing():
        results["left_out"]["llama.cpp"] = why
    elif source is None:
        results["left_out"]["llama.cpp"] = f"no GGUF file of {args.model}, expected --gguf FILE"
    else:
        for dtype in ("float32", "float16"):
            file = folder / f"{dtype}.gguf"
            peers_llama_cpp.write_gguf(source, file, dtype)
            model = peers_llama_cpp.LlamaCpp(file, dtype=dtype, threads=threads)
            results["versions"]["llama.cpp"] = model.version
            out[f"llama.cpp {dtype}"] = (dtype, model.generate)
    return out


def _cell(here: Any, others: Mapping[str, tuple[str, Generate]], seeds: int, new: int) -> dict[str, Any]:
    """Everyone on the prompts of every seed, in an order that turns with the seed."""
    taken = {n: g for n, g in others.items() if here.batch == 1 or "lookup" not in n}
    speeds: dict[str, dict[str, list[float]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for seed in range(seeds):
        prompts = here.prompts(seed)
        names = ["here", *taken]
        answers: dict[str, Answers] = {}
        margins: list[np.ndarray] = []
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            if name == "here":
                for method, run in here.decode(seed).items():
                    speeds.setdefault(method, {"decode": [], "prefill": []})
                    speeds[method]["decode"].append(run.report.tokens_per_second)
                    speeds[method]["prefill"].append(here.prefill_rate)
                    answers[method] = [a.token_ids for a in run.answers]
                    if method == REFERENCE:
                        margins = [a.margins for a in run.answers]
            else:
                answers[name], prefill, decode = taken[name][1](prompts, new)
                speeds.setdefault(name, {"decode": [], "prefill": []})
                # The first token belongs to the prefill.
                speeds[name]["decode"].append((new - 1) * len(prompts) / decode)
                speeds[name]["prefill"].append(sum(len(p) for p in prompts) / prefill)
        for name, tokens in answers.items():
            precision = taken[name][0] if name in taken else "float32"
            one = compared(answers[REFERENCE], margins, tokens, EXPLAINED[precision])
            total = found.setdefault(name, {"answers": 0, "equal": 0, "unexplained": 0, "margins": []})
            for key, value in one.items():
                total[key] += value
    order = [*here.methods, *taken]
    programs = [
        {
            "program": name,
            "precision": taken[name][0] if name in taken else "float32",
            "decode_tokens_per_second": spread.interval(speeds[name]["decode"]),
            "prefill_tokens_per_second": spread.interval(speeds[name]["prefill"]),
            **found[name],
        }
        for name in order
    ]
    return {"context": here.context, "batch": here.batch, "prompt_tokens": here.lengths, "programs": programs}


def compared(reference: Answers, margins: Sequence[np.ndarray], answers: Answers, explained: float) -> dict[str, Any]:
    """Counts of answers, equal ones, and those whose first difference no rounding explains; margins at differences."""
    out: dict[str, Any] = {"answers": len(reference), "equal": 0, "unexplained": 0, "margins": []}
    for right, margin, tokens in zip(reference, margins, answers, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(right, tokens, strict=False)) if a != b), None)
        if place is None and len(right) == len(tokens):
            out["equal"] += 1
            continue
        lead = float(margin[place]) if place is not None else None  # None: one merely goes on
        out["margins"].append(lead)
        out["unexplained"] += lead is None or lead >= explained
    return out


def _text(cell: dict[str, Any]) -> str:
    lines = [f"{cell['batch']} x {cell['context']:,} tokens", f"{'':<38}{'decode':>18}{'prefill':>18}{'equal':>8}"]
    for row in cell["programs"]:
        name = row["program"] + ("" if row["precision"] in row["program"] else f" {row['precision']}")
        decode, prefill = (spread.text(row[f"{k}_tokens_per_second"], 1) for k in ("decode", "prefill"))
        notes = "" if not row["unexplained"] else f"  {row['unexplained']} NOT near ties"
        lines.append(f"{name:<38}{decode:>18}{prefill:>18}{row['equal']:>5}/{row['answers']}{notes}")
    return "\n".join(lines)


def draw(results: dict[str, Any], file: str) -> None:
    """Decode speed of every program, by batch and context; prefill below."""
    cells = results["cells"]
    groups = [f"{cell['batch']} x {cell['context']:,} tokens" for cell in cells]
    names = list(dict.fromkeys(row["program"] for cell in cells for row in cell["programs"]))
    width = max(7.0, 1.2 + 0.5 * len(names) * len(groups))
    title = f"The same weights and threads: {results['model']}, {results['threads']} threads"
    made, axes = plots.figure(title, 2, columns=1, width=width, height=2.8)
    for each, kind in zip(axes, ("decode", "prefill"), strict=True):
        rows = {n: [_row(cell, n, kind) for cell in cells] for n in names}
        plots.intervals(each, groups, rows, label=f"{kind}, tokens/s", text="{:.0f}")
    plots.legend(axes[0], columns=4)
    versions = ", ".join(results["versions"].values())
    plots.note(made, f"{plots.where(results)}; {versions}")
    plots.save(made, file)


def _row(cell: dict[str, Any], name: str, kind: str) -> dict[str, Any] | None:
    return next((r[f"{kind}_tokens_per_second"] for r in cell["programs"] if r["program"] == name), None)


if __name__ == "__main__":
    sys.exit(main())
