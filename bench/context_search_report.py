"""What the context search found, as plain data, as Markdown tables and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bench import plots

Row = Mapping[str, Any]


def plain(value: Any) -> Any:
    """`value` with policies as their names and fields, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def markdown(results: Mapping[str, Any]) -> str:
    """The tables, with how they were made."""
    found, report = results["search"], results["report"]
    chosen = {key: value for key, value in found["best"].items() if key != "type"}
    lines = [
        "# Which sparse context accepts most?",
        "",
        (
            f"Mean accepted length when drafting {results['drafts']} tokens, greedy, contexts of about "
            f"{results['context']:,} tokens; made by"
        ),
        "",
        f"    {results['command']}",
        "",
        (
            f"on {plots.where(results)}; seed {results['seed']}, {results['max_tokens']} tokens an answer, "
            f"{results['minutes']:.0f} minutes. *Novel* are the verifications where fewer than 34 % of the next 13 "
            "tokens' 4-grams stood in the answer before ([bench/novelty.py](../bench/novelty.py)). The error is a "
            "standard error over prompts (bootstrap); verifications counted in brackets."
        ),
        "",
        f"## The report half: {results['prompts']} prompts the search has not seen",
        "",
        "| context policy | tokens read | all | novel | against refresh layer N-2 (95 % interval) |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row['name']} | {row['budget']} | {_length(row['all'])} | {_length(row['novel'])} | {_against(row)} |"
            for row in report["rows"]
        ),
        "",
        (
            f"The best policy found is `BlendContext({', '.join(f'{k}={_short(v)}' for k, v in chosen.items())})`. "
            f"{report['answers_that_differ']} answers of these runs differ from the first policy's."
        ),
        "",
        f"## The search half: {results['prompts']} prompts, budget {results['budget']} tokens",
        "",
        "Setting by setting from the top, each time keeping the value with the highest novel mean (bold).",
        "",
        "| setting | value | all | novel |",
        "| --- | --- | --- | --- |",
    ]
    for row in found["baselines"]:
        lines.append(f"| baseline | {row['name']} | {_length(row['all'])} | {_length(row['novel'])} |")
    for setting in dict.fromkeys(row["setting"] for row in found["tried"]):
        rows = [row for row in found["tried"] if row["setting"] == setting]
        best = max(rows, key=lambda row: row["novel"]["mean"])
        for row in rows:
            name, novel = _short(row["value"]), _length(row["novel"])
            if row is best:
                name, novel = f"**{name}**", f"**{novel}**"
            lines.append(f"| `{setting}` | {name} | {_length(row['all'])} | {novel} |")
    return "\n".join(lines) + "\n"


def draw(results: Mapping[str, Any], file: str) -> None:
    """Accepted length on the report half: a group a budget, a bar a policy."""
    rows = results["report"]["rows"]
    made, axes = plots.figure(f"Accepted of {results['drafts']} drafts on unseen prompts", 2, width=5.4)
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    for each, kind in zip(axes, ("novel", "all"), strict=True):
        by = {(row["name"], row["budget"]): row[kind] for row in rows}
        plots.bars(
            each,
            [f"{b} tokens read" for b in budgets],
            {n: [by[n, b]["mean"] if (n, b) in by else None for b in budgets] for n in names},
            {n: [1.96 * by[n, b]["standard_error"] if (n, b) in by else None for b in budgets] for n in names},
            label=f"mean accepted length, {kind}",
            text="{:.1f}",
        )
    plots.legend(axes[0])
    plots.note(made, plots.where(results))
    plots.save(made, file)


def _length(found: Row) -> str:
    return f"{found['mean']:.2f} ± {found['standard_error']:.2f} ({found['verifications']})"


def _against(row: Row) -> str:
    if "against_reference" not in row:
        return ""
    value, low, high = row["against_reference"]
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def _short(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "(" + ", ".join(map(str, value)) + ("," if len(value) == 1 else "") + ")"
    return f"{value:g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)
