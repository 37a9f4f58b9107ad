"""What `bench.throughput` prints, its Markdown table and its picture."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from bench import plots, spread

_COLUMNS = (
    ("method", "<20"),
    ("tokens/s", ">14"),
    ("x plain", ">14"),
    ("per verif.", ">13"),
    ("accepted", ">10"),
    ("novel", ">7"),
    ("ms/token p50", ">13"),
    ("p95", ">7"),
    ("p99", ">7"),
    ("MB/token", ">9"),
    ("bandwidth", ">10"),
    ("equal", ">9"),
)


def cell_text(cell: dict[str, Any]) -> str:
    """A cell as a table."""
    low, high = cell["prompt_tokens"]
    prefill = spread.text(cell["prefill_tokens_per_second"], 0)
    before, after = (cell["rates"][i]["read_gb_s"] for i in (0, -1))
    what = f"{cell['batch']} x {low:,} to {high:,} tokens, {cell['mode']}"
    lines = [f"{what} ({before:.0f}, then {after:.0f} GB/s; prefill {prefill} tokens/s)"]
    lines.append("".join(f"{name:{width}}" for name, width in _COLUMNS))
    for name, m in cell["methods"].items():
        latency = m["time_per_output_token_ms"]
        values = [
            name,
            spread.text(m["tokens_per_second"], 1),
            spread.text(m["speedup"]),
            spread.text(m["tokens_per_verification"]),
            _share(m["acceptance"]),
            _share(m["acceptance_novel"]),
            *(f"{latency[key]:.1f}" for key in ("median", "p95", "p99")),
            f"{m['bytes_per_token'] / 1e6:.0f}",
            f"{m['bandwidth_share']:.0%}",
            f"{m['exact']}/{m['answers']}" + (f" {m['defects']} DEFECTS" if m["defects"] else ""),
        ]
        lines.append("".join(f"{value:{width}}" for value, (_, width) in zip(values, _COLUMNS, strict=True)))
    return "\n".join(lines)


def write_table(results: dict[str, Any], file: str) -> None:
    """The Markdown table, complete or not at all."""
    path = Path(file)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(markdown(results), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def markdown(results: dict[str, Any]) -> str:
    """All cells as one Markdown table, with what it was measured on and how."""
    m = results["machine"]
    how = (
        f"{plots.where(results)}, load {m['load'][0]} before the run; {results['seeds']} seeds, "
        f"{results['max_tokens']} tokens an answer. Means and 95 % intervals over seeds; the speedup is over "
        "`autoregressive` in the same run on the same prompts. Acceptance is accepted / verified drafts, of all and of "
        "those at novel places ([bench/novelty.py](../bench/novelty.py))."
    )
    columns = ["context", "batch", "method", "tokens/s", "x autoregressive", "tokens per verification", "acceptance"]
    columns += ["novel", "ms per token: median, p95, p99", "bandwidth", "equal answers"]
    out = ["# Methods, side by side", "", how, "", f"    {results['command']}", ""]
    out += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for cell in results["cells"]:
        where = cell["context"] + ("" if cell["mode"] == "replayed" else ", continuous")
        for name, f in cell["methods"].items():
            latency = f["time_per_output_token_ms"]
            values = [
                where,
                str(cell["batch"]),
                f"`{name}`",
                spread.text(f["tokens_per_second"], 1),
                spread.text(f["speedup"]),
                spread.text(f["tokens_per_verification"]),
                _share(f["acceptance"]),
                _share(f["acceptance_novel"]),
                ", ".join(f"{latency[key]:.0f}" for key in ("median", "p95", "p99")),
                f"{f['bandwidth_share']:.0%}",
                f"{f['exact']} of {f['answers']}" + (f", {f['near_ties']} near ties" if f["near_ties"] else ""),
            ]
            out.append("| " + " | ".join(values) + " |")
    out += [f"\nLeft out: `{name}` ({why})." for name, why in results["left_out"].items()]
    return "\n".join(out) + "\n"


def draw(results: dict[str, Any], file: str) -> None:
    """Speedup, tokens per verification and acceptance on novel text of every method, by context and batch size."""
    cells = results["cells"]
    groups = [f"{c['batch']} x {c['context']}" + ("" if c["mode"] == "replayed" else "\ncontinuous") for c in cells]
    names = list(dict.fromkeys(name for c in cells for name in c["methods"]))
    panels = (
        ("speedup", "decode speed / AutoRegressive's", "{:.2f}"),
        ("tokens_per_verification", "tokens per verification", "{:.1f}"),
        ("acceptance_novel", "accepted drafts at novel places", "{:.0%}"),
    )
    width = max(7.0, 1.2 + 0.34 * len(names) * len(groups))
    title = f"Every method on the same prompts: {results['model']}, {results['seeds']} seeds, 95 % intervals"
    made, axes = plots.figure(title, len(panels), columns=1, width=width, height=2.5)
    for each, (key, label, text) in zip(axes, panels, strict=True):
        drawn = {name: [c["methods"].get(name, {}).get(key) for c in cells] for name in names}
        plots.intervals(each, groups, drawn, label=label, text=text, most=1.0 if "%" in text else math.inf)
    axes[0].axhline(1, color=plots.INK, linewidth=0.8)
    plots.legend(axes[0])
    plots.note(made, plots.where(results))
    plots.save(made, file)


def _share(figure: dict[str, Any] | None) -> str:
    return "-" if figure is None else f"{figure['mean']:.0%}"
