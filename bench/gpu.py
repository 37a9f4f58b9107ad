"""What the GPU kernels and the decode loop reach on one H100 or H200. One command, at most 8 minutes.

    python -m bench.gpu [--json gpu.json] [--minutes 8] [--only PART ...]

Needs jax with CUDA, flax and numpy, and this checkout; no network. Weights are random and at full size; acceptances are
drawn with what the paper reports of them and forced upon the loop (see `gpu_replay`), so speeds are real and texts are
not. Parts come in order of worth; each result is written as soon as it is there, so a run that is cut off, or runs out
of its minutes, keeps what it had. Compiled programs are kept in .cache/jax: a second run gets further.

  kernels     each kernel against float64, then its bandwidth against that of a copy
  models      for each model: step times and the cost model's fit, then whole runs of every method against the paper's
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before jax is imported: its own default leaves a quarter of the memory unused.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax

PARTS = ("kernels", "models")


class Report:
    """Results on disk as they come, and the time that is left.

    Attributes:
      results: what is written.
    """

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.began = path, time.monotonic()
        self.end = self.began + 60 * minutes
        self.results: dict[str, Any] = {"skipped": [], "errors": []}

    def left(self) -> float:
        """Seconds left."""
        return self.end - time.monotonic()

    def save(self) -> None:
        """Writes everything so far; a reader never sees half of it."""
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text(json.dumps(self.results, indent=2) + "\n")
        temporary.replace(self.path)

    def measure(self, name: str, needs: float, work: Callable[[], Any]) -> Any:
        """Does one piece of work if `needs` seconds are left; its result goes into the results, or its error does."""
        if self.left() < needs:
            self.results["skipped"].append(name)
            print(f"{name}: skipped, {self.left():.0f} s left", flush=True)
            self.save()
            return None
        began, found = time.monotonic(), None
        try:
            found = self.results[name] = work()
        except Exception as error:  # one piece that fails must not cost the others
            self.results["errors"].append({"name": name, "error": f"{type(error).__name__}: {error}"[:2000]})
            traceback.print_exc()
        print(f"{name}: {time.monotonic() - began:.1f} s, {self.left():.0f} s left", flush=True)
        self.save()
        return found

    def finish(self) -> int:
        """Writes, prints the table, and says by the exit code whether all went well."""
        self.results["seconds"] = time.monotonic() - self.began
        self.save()
        print(table(self.results), flush=True)
        wrong = any(not case["ok"] for case in self.results.get("correctness") or ())
        return 1 if wrong or self.results["errors"] else 0

    def cut_off(self) -> None:
        """Ends the process at its time, in the middle of whatever it does: a compilation cannot be interrupted."""
        self.results["errors"].append({"name": "time", "error": "cut off in the middle of a piece of work"})
        os._exit(self.finish())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", default="gpu.json", help="where results go (default: gpu.json)")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (default: 8)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes in Pallas's interpreter: shows that this runs")
    args = parser.parse_args(arguments)
    from bench import gpu_kernels, gpu_replay, gpu_steps, machine
    from bench.gpu_sizes import FULL, TINY

    if not args.tiny and jax.default_backend() != "gpu":
        parser.exit(2, f"bench.gpu: error: device: {jax.default_backend()}, expected a GPU (or --tiny)\n")
    sizes = TINY if args.tiny else FULL
    if not args.tiny:
        jax.config.update("jax_compilation_cache_dir", str(Path(".cache/jax").resolve()))
    report = Report(Path(args.json), args.minutes)
    given = sys.argv[1:] if arguments is None else arguments
    report.results |= {"command": " ".join([parser.prog, *given]), "machine": machine.describe(), "tiny": args.tiny}
    if not args.tiny:
        clock = threading.Timer(report.left(), report.cut_off)
        clock.daemon = True
        clock.start()
    copy = report.measure("copy_gb_s", 5, lambda: gpu_kernels.copy_rate(sizes))
    if "kernels" in args.only:
        report.measure("correctness", 20, lambda: gpu_kernels.correctness(sizes))
        report.measure("bandwidth", 30, lambda: gpu_kernels.bandwidth(sizes, copy or float("nan")))
    for name in sizes.models if "models" in args.only else ():
        with gpu_steps.Held() as held:  # the weights go before the next model's come
            made = report.measure(f"{name}: weights", 25, functools.partial(gpu_steps.weights, sizes, name, held))
            if made is None:
                continue
            steps = report.measure(f"{name}: steps", 60, functools.partial(gpu_steps.measure, sizes, name, held, copy))
            for method in sizes.methods:
                work = functools.partial(gpu_replay.measure, sizes, name, held, method, steps)
                report.measure(f"{name}: {method}", 45, work)
    return report.finish()


def table(results: dict[str, Any]) -> str:
    """The short table."""
    lines = [f"{results['machine']['device']}, jax {results['machine']['jax']}; copy {results.get('copy_gb_s')} GB/s"]
    for case in results.get("correctness") or ():
        lines.append(f"  {case['case']:<34} error {case['error']:.1e} {'ok' if case['ok'] else 'WRONG'}")
    for case in results.get("bandwidth") or ():
        lines.append(f"  {case['case']:<34} {case['microseconds']:9.1f} us {case['share_of_copy']:6.0%} of copy")
    for name, found in results.items():
        if name.endswith(": steps") and found:
            for step in found["steps"]:
                lines.append(f"  {name.split(':')[0]:<30} {step['kind']:<22} {step['milliseconds']:8.2f} ms")
            lines.append(f"  {'':<30} fit: mean absolute error {found['fit']['mean_absolute_percentage_error']:.1f} %")
        elif isinstance(found, dict) and "tokens_per_second" in found:
            paper = found.get("paper_speedup")
            lines.append(
                f"  {name:<46} {found['tokens_per_second']:9.1f} tokens/s"
                + (f", paper's speedup {paper}" if paper else "")
            )
    for name in results["skipped"]:
        lines.append(f"  {name}: skipped")
    for error in results["errors"]:
        lines.append(f"  {error['name']}: {error['error'].splitlines()[0][:120]}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
