"""What every benchmark's command line shares: --json, --plot, --quick, one line for bad input, the result's header."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aspire_jax.cli.setup import write_json
from aspire_jax.errors import InputError, written_or_standard

Results = dict[str, Any]


class Say:
    """Tells how a benchmark goes, and keeps what it has so far: a run of an hour may end before its end.

    Nothing is told where JSON goes to standard output.
    """

    def __init__(self, file: str | None, header: Results) -> None:
        self._quiet, self._header = file == "-", header
        self._partial = None if file in (None, "-") else f"{file}.partial"

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    def keep(self, results: Results) -> None:
        """Writes the results so far to FILE.partial."""
        if self._partial is not None:
            write_json(self._partial, self._header | results)

    def done(self) -> None:
        """Everything is written: removes what was kept."""
        if self._partial is not None:
            Path(self._partial).unlink(missing_ok=True)


def parser(name: str, doc: str | None, *, quick: str, plot: str) -> argparse.ArgumentParser:
    """A parser that explains the benchmark by its module's docstring and has the common options.

    Args:
      name: the module's, without `bench.`.
      quick: what --quick leaves out.
      plot: what the picture shows.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--json", type=written_or_standard, metavar="FILE", help="write the results; - for standard output alone"
    )
    made.add_argument("--plot", metavar="FILE", help=f"draw {plot}; PNG or SVG by the name's ending")
    made.add_argument("--quick", action="store_true", help=f"{quick}: about two minutes")
    return made


def run(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, Say], Results],
    draw: Callable[[Results, str], None],
    arguments: Sequence[str] | None = None,
    passed: Callable[[Results], bool] = lambda _: True,
    *,
    folder: bool = False,
) -> int:
    """Parses, measures, writes JSON and picture. The exit code: 0, 1 where the results do not pass, 2 for bad input.

    Args:
      measure: from the arguments, with the whole `command` among them, and a `Say`.
      draw: the picture of the results into a file.
      folder: whether --plot may also name a folder, which `draw` then gets.
    """
    args = parser.parse_args(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args.command = " ".join([parser.prog, *given])
    header = {"command": args.command}
    say = Say(args.json, header)
    try:
        check_plot(args.plot, folder=folder)
        results = header | measure(args, say)
        if args.json:
            write_json(args.json, results)
            say.done()
        if args.plot:
            draw(results, args.plot)
    except (ValueError, OSError) as error:  # an option out of its range is a ValueError
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0 if passed(results) else 1


def check_plot(file: str | None, *, folder: bool = False) -> None:
    """Refuses a picture that could not be written, before anything is measured; a folder where it may be one."""
    if file is None:
        return
    path = Path(file)
    if folder and path.is_dir():
        path = path / "all.png"
    if path.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"--plot: {file}, expected a name that ends in .png or .svg")
    if not path.parent.is_dir():
        raise InputError(f"--plot: {file}, expected a folder that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot: matplotlib is not installed, expected: pip install 'aspire-jax[bench]'")
