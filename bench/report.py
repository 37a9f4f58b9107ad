"""One page of what this machine can measure in twenty minutes: tables and pictures, in a file that needs no other.

    python -m bench.report [report.html] [--data FILE ...] [--minutes 20] [--json FILE]

Runs the benchmarks in their quick form, each in a process of its own, one after the other until the time is used up.
What did not run is named with the reason. The page holds every picture, what was printed, and the figures as JSON.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aspire_jax.cli.setup import write_json
from aspire_jax.errors import InputError
from bench import machine


class Part(NamedTuple):
    """A benchmark of the report: its module, title, what to look at, and whether it takes --data."""

    name: str
    title: str
    about: str
    data: bool = True


PARTS = (
    Part(
        "throughput",
        "Methods against AutoRegressive",
        "The same prompts through every method, in turns. A speedup above 1 is a gain; tokens per verification say how "
        "many tokens one full read of the context yields; acceptance at novel places leaves the model's own loops out.",
    ),
    Part(
        "exactness",
        "Are the answers the same?",
        "Every answer compared with plain decoding, token by token. A near tie is two logits closer than rounding; a "
        "defect is any other difference, and there should be none.",
    ),
    Part(
        "ceiling",
        "What a step costs",
        "A draft reads a part of the context, a verification all of it with several tokens. Their times, in plain "
        "steps, bound what any method can gain on this machine.",
    ),
    Part(
        "peers",
        "Beside other programs",
        "The same weights, prompts and threads through transformers and llama.cpp. Higher is faster.",
    ),
    Part(
        "simulate",
        "The paper's machine, simulated",
        "The library's own policies on a model of the paper's GPU: its table 1 beside the simulation.",
        data=False,
    ),
    Part(
        "studies",
        "The paper's studies",
        "What the paper found out about drafts and schedulers, found out again on this model: each panel has the "
        "paper's figures beside its own. Two short prompts, so wide intervals.",
    ),
    Part(
        "context_search",
        "Which pages a draft should read",
        "Accepted tokens by context policy at one budget.",
    ),
    Part(
        "convert_memory",
        "Memory of a conversion",
        "A conversion streams: its peak stays below a bound that does not grow with the model.",
        data=False,
    ),
)


def main() -> int:
    made = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("page", nargs="?", default="report.html", help="HTML file to write (default: report.html)")
    made.add_argument("--data", nargs="+", default=[], metavar="FILE", help="prompts (see bench/datasets.py)")
    made.add_argument("--minutes", type=float, default=20.0, help="time for everything (default: 20)")
    made.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(p.name for p in PARTS)}")
    made.add_argument("--json", metavar="FILE", help="also write all results in one file; - for standard output alone")
    args = made.parse_args()
    try:
        results = measure(args)
        if args.json:
            write_json(args.json, results)
        write_page(results, Path(args.page))
    except (InputError, OSError) as error:
        print(f"{made.prog}: error: {error}", file=sys.stderr)
        return 2
    if args.json != "-":
        print(f"wrote {args.page}")
    return 1 if any(run["code"] == 1 for run in results["parts"]) else 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the parts; what is left of the time is the next one's limit."""
    names = [p.name for p in PARTS]
    unknown = [name for name in args.only or () if name not in names]
    if unknown:
        raise InputError(f"--only: {' '.join(unknown)}, expected some of {', '.join(names)}")
    for file in args.data:
        if not Path(file).is_file():
            raise InputError(f"--data: {file}, expected a file that exists")
    ends = time.monotonic() + 60 * args.minutes
    given = " ".join(["python -m bench.report", *sys.argv[1:]])
    results: dict[str, Any] = {"command": given, "machine": machine.describe(), "parts": []}
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            if args.only and part.name not in args.only:
                continue
            data = ["--data", *args.data] if part.data and args.data else []
            run = run_part(part, data, Path(folder), ends - time.monotonic())
            results["parts"].append(run)
            if args.json != "-":
                print(f"{part.name}: {run['outcome']}, {run['seconds']:.0f} s", flush=True)
    return results


def run_part(part: Part, data: Sequence[str], folder: Path, seconds: float) -> dict[str, Any]:
    """One benchmark in its own process: what it printed, its results and its picture where there are any."""
    figures, picture = folder / f"{part.name}.json", folder / f"{part.name}.svg"
    line = ["-m", f"bench.{part.name}", "--quick", *data]
    shown = "python " + " ".join(line)
    out: dict[str, Any] = {"name": part.name, "command": shown, "seconds": 0.0, "code": None, "text": ""}
    out |= {"results": None, "picture": None}
    if seconds < 30:
        return out | {"outcome": "not run: no time was left"}
    began = time.monotonic()
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    child = subprocess.Popen(
        [sys.executable, *line, "--json", str(figures), "--plot", str(picture)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with what it started itself
        text, _ = child.communicate()
        return out | {"outcome": "not finished: the time was used up", "seconds": seconds, "text": text.strip()}
    out |= {"seconds": time.monotonic() - began, "code": child.returncode, "text": text.strip()}
    if figures.is_file():
        out["results"] = json.loads(figures.read_text(encoding="utf-8"))
    if picture.is_file():
        out["picture"] = picture.read_text(encoding="utf-8")
    if child.returncode == 0:
        return out | {"outcome": "done"}
    last = out["text"].splitlines()[-1] if out["text"] else "no message"
    if child.returncode == 1 and out["results"] is not None:
        return out | {"outcome": "done, and it did not pass"}
    return out | {"outcome": f"failed with exit code {child.returncode}: {last}"}


def write_page(results: dict[str, Any], file: Path) -> None:
    """The page, complete or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(page(results), encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def page(results: dict[str, Any]) -> str:
    """The page as HTML: nothing in it is loaded from elsewhere."""
    parts = {p.name: p for p in PARTS}
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in _machine(results))
    state = "".join(
        f'<tr><td><a href="#{run["name"]}">{html.escape(parts[run["name"]].title)}</a></td>'
        f"<td>{html.escape(run['outcome'])}</td><td>{run['seconds']:.0f} s</td></tr>"
        for run in results["parts"]
    )
    body = "".join(_section(parts[run["name"]], run) for run in results["parts"])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>aspire-jax: measured on this machine</title><style>{_STYLE}</style></head><body><main>
<h1>aspire-jax: measured on this machine</h1>
<p>Quick runs: short contexts, few tokens, few seeds. They show that everything works here and which way the figures
point; each benchmark without <code>--quick</code> gives figures to quote.</p>
<h2>Where</h2><table>{rows}</table>
<h2>What ran</h2><table><tr><th>benchmark</th><th>outcome</th><th>time</th></tr>{state}</table>
{body}</main></body></html>
"""


def _machine(results: dict[str, Any]) -> list[tuple[str, Any]]:
    m = results["machine"]
    cores = f"{m['cores']} cores of {m['cpu']}, {m['memory_gb']} GB"
    load = ", ".join(map(str, m["load"]))
    versions = ", ".join(f"{name} {m[name]}" for name in ("python", "jax", "numpy") if m.get(name))
    return [
        ("device", m["device"] if m["device"] != "cpu" else cores),
        ("system", m["system"]),
        ("versions", versions),
        ("time", m["time"]),
        ("load before (1, 5, 15 minutes)", load),
        ("command", results["command"]),
    ]


def _section(part: Part, run: dict[str, Any]) -> str:
    out = [f'<section id="{part.name}"><h2>{html.escape(part.title)}</h2><p>{html.escape(part.about)}</p>']
    if run["picture"]:
        data = base64.b64encode(run["picture"].encode()).decode()
        out.append(f'<img alt="{html.escape(part.title)}" src="data:image/svg+xml;base64,{data}">')
    else:
        out.append(f"<p class=missing>No picture: {html.escape(run['outcome'])}.</p>")
    out.append(f"<pre class=command>{html.escape(run['command'])}</pre>")
    if run["text"]:
        out.append(f"<details open><summary>what it printed</summary><pre>{html.escape(run['text'])}</pre></details>")
    if run["results"] is not None:
        figures = html.escape(json.dumps(run["results"], indent=1, ensure_ascii=False))
        out.append(f"<details><summary>all figures (JSON)</summary><pre>{figures}</pre></details>")
    return "".join([*out, "</section>"])


_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#222;background:#fff;margin:0}
main{max-width:1060px;margin:0 auto;padding:24px}
h1{font-size:26px}h2{font-size:20px;margin-top:40px;border-bottom:1px solid #ddd;padding-bottom:4px}
table{border-collapse:collapse}td,th{text-align:left;padding:3px 16px 3px 0;vertical-align:top;font-size:14px}
img{max-width:100%;height:auto;margin:8px 0}
pre{font:12px/1.45 ui-monospace,monospace;background:#f6f6f6;padding:10px;overflow-x:auto;max-height:420px}
pre.command{background:none;padding:0;color:#666}
.missing{color:#a33}summary{cursor:pointer;color:#555;font-size:14px}
"""


if __name__ == "__main__":
    sys.exit(main())
