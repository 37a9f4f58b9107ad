"""What the GPU kernels and the decode loop reach on one H100 or H200. One command, at most 8 minutes.

    python -m bench.gpu [--json gpu.json] [--minutes 8] [--only PART ...] [--resume] [--plan GB/S]

Needs jax with CUDA, flax and numpy, and this checkout; no network. Weights are random and at full size; acceptances are
drawn with what the paper reports of them and forced upon the loop (see `gpu_replay`), so speeds are real and texts are
not. Parts come in order of worth; each result is written as soon as it is there, so a run that is cut off, or runs out
of its minutes, keeps what it had.

  kernels     each kernel against float64, then its bandwidth against that of a copy
  models      for each model: step times and the cost model's fit; then whole runs of every method on every workload of
              the paper's table 1, beside the paper's

The runs of the whole table take three to four minutes on an H100, compiling their 135 programs takes longer than eight:
what a first run did not come to is listed as skipped. Compiled programs are kept in .cache/jax, and with --resume the
next run goes on behind the results that the file has.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before jax is imported: its own default leaves a quarter of the memory unused.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax

from bench.gpu_table import table

if TYPE_CHECKING:
    from bench.gpu_plan import Stage
    from bench.gpu_sizes import Sizes

PARTS = ("kernels", "models")


class Report:
    """Results on disk as they come, and the time that is left.

    Attributes:
      results: what is written.
    """

    def __init__(self, path: Path, minutes: float, kept: dict[str, Any] | None = None) -> None:
        """`kept`: results of an earlier run that this one goes on from."""
        self.path, self.began = path, time.monotonic()
        self.end = self.began + 60 * minutes
        self.results: dict[str, Any] = {**(kept or {}), "skipped": [], "errors": []}
        self._longest: dict[str, float] = {}

    def left(self) -> float:
        """Seconds left."""
        return self.end - time.monotonic()

    def save(self) -> None:
        """Writes everything so far; a reader never sees half of it."""
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text(json.dumps(self.results, indent=2) + "\n")
        temporary.replace(self.path)

    def has(self, name: str) -> bool:
        """Whether a piece is done."""
        return self.results.get(name) is not None

    def measure(self, name: str, needs: float, work: Callable[[], Any], like: str = "") -> Any:
        """Does one piece of work if `needs` seconds are left; its result goes into the results, or its error does.

        Nothing is done for a result that is there. Pieces `like` each other need as long as the longest of them took.
        """
        if self.has(name):
            return self.results[name]
        if self.left() < max(needs, self._longest.get(like, 0.0)):
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
        took = time.monotonic() - began
        if like:
            self._longest[like] = max(took, self._longest.get(like, 0.0))
        print(f"{name}: {took:.1f} s, {self.left():.0f} s left", flush=True)
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
    parser.add_argument("--resume", action="store_true", help="keep the results that the file has, measure the others")
    parser.add_argument("--plan", type=float, metavar="GB/S", help="print what would be run and read, without a GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, kernels interpreted: shows that this runs")
    args = parser.parse_args(arguments)
    from bench import gpu_kernels, gpu_plan, machine
    from bench.gpu_sizes import FULL, TINY

    sizes = TINY if args.tiny else FULL
    if args.plan is not None:
        print(gpu_plan.describe(sizes, args.plan))
        return 0
    if not args.tiny and jax.default_backend() != "gpu":
        parser.exit(2, f"bench.gpu: error: device: {jax.default_backend()}, expected a GPU (or --tiny, or --plan)\n")
    if not args.tiny:
        jax.config.update("jax_compilation_cache_dir", str(Path(".cache/jax").resolve()))
    about, path = machine.describe(), Path(args.json)
    try:
        kept = _kept(path, about) if args.resume else {}
    except ValueError as error:
        parser.exit(2, f"bench.gpu: error: --resume: {error}\n")
    report = Report(path, args.minutes, kept)
    given = sys.argv[1:] if arguments is None else arguments
    report.results |= {"command": " ".join([parser.prog, *given]), "machine": about, "tiny": args.tiny}
    if not args.tiny:
        clock = threading.Timer(report.left(), report.cut_off)
        clock.daemon = True
        clock.start()
    copy = report.measure("copy_gb_s", 5, lambda: gpu_kernels.copy_rate(sizes))
    if "kernels" in args.only:
        report.measure("correctness", 20, lambda: gpu_kernels.correctness(sizes))
        report.measure("bandwidth", 30, lambda: gpu_kernels.bandwidth(sizes, copy or float("nan")))
    for stage in gpu_plan.stages(sizes) if "models" in args.only else ():
        _stage(report, sizes, stage, copy)
    return report.finish()


def _stage(report: Report, sizes: Sizes, stage: Stage, copy: float | None) -> None:
    """One workload of one model: weights, single steps where asked for, programs, whole runs."""
    from bench import gpu_plan, gpu_replay, gpu_steps
    from bench.gpu_sizes import Load

    name, where = stage.model, f"{stage.model}, {stage.workload}"
    left = tuple(m for m in stage.methods if not report.has(f"{where}: {m}"))
    asks = stage.steps and not report.has(f"{name}: steps")
    if not left and not asks:
        return
    with gpu_steps.Held() as held:  # the weights go before the next stage's come
        report.measure(f"{where}: weights", 25, lambda: gpu_steps.weights(sizes, name, held), "weights")
        report.results.pop(f"{where}: weights", None)  # they are not there for a run that resumes
        if held.params is None:
            return

        def fitting(load: Load) -> Load:
            return gpu_plan.fitting(sizes, name, load, _memory())

        if asks:
            load = fitting(Load(sizes.batch[name], sizes.context))
            report.measure(f"{name}: steps", 50, lambda: gpu_steps.measure(sizes, name, held, load, copy), "steps")
        steps = report.results.get(f"{name}: steps")
        load, ready = fitting(sizes.load(name, stage.workload)), gpu_replay.Ready()
        report.measure(
            f"{where}: programs", 40, lambda: gpu_replay.prepare(sizes, name, held, load, left, ready), "programs"
        )
        report.results.pop(f"{where}: programs", None)
        coefficients = gpu_replay.coefficients_of(sizes, name, steps, copy)
        for method in left:
            work = functools.partial(
                gpu_replay.measure, sizes, name, stage.workload, load, method, held, ready, coefficients
            )
            needs = 12.0 if method in ready else math.inf
            report.measure(f"{where}: {method}", needs, work, "run")


def _memory() -> int | None:
    """Bytes that the device lets a program have, where it says."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def _kept(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The results of an earlier run.

    Raises:
      ValueError: there are none, or none of this machine.
    """
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}, expected the results of an earlier run") from error
    for what in ("device", "jax"):
        found = kept.get("machine", {}).get(what) if isinstance(kept, dict) else None
        if found != about[what]:
            raise ValueError(f"{path}: {what} {found!r}, expected {about[what]!r}")
    return kept


if __name__ == "__main__":
    sys.exit(main())
