"""The command line: `aspire generate`, `aspire trace`, `aspire demo`, `aspire info`, `aspire convert`.

Every command returns an exit code: 0, 1 where the outcome is bad (`demo`: an answer differs), 2 for bad input, 130
where it was interrupted. Nothing heavy is imported before the arguments are known to be good.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from aspire_jax.cli import allocator, convert, demo, generate, info, trace
from aspire_jax.errors import InputError
from aspire_jax.interrupt import terminate_as_interrupt

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_COMMANDS = {"generate": generate, "trace": trace, "demo": demo, "info": info, "convert": convert}
_DECODING = ("generate", "trace", "demo")


def process() -> int:
    """`aspire`: runs the command that this process was started for, decoding with memory settings of its own."""
    return main(prepare=allocator.settle)


def main(argv: Sequence[str] | None = None, prepare: Callable[[], None] = lambda: None) -> int:
    """Runs the command that `argv` names. Returns the exit code.

    Args:
      prepare: called before a command that decodes, once its arguments are known to be good.
    """
    parser = _Parser(prog="aspire", description="Exact long-context batch decoding, faster.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        summary = summary.split(": ", 1)[-1]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # --help, or an error that is already printed
        return int(stop.code or 0)
    if args.version:
        print(_version())
        return OK
    if args.command is None:
        parser.print_help()
        return BAD_INPUT
    if args.command in _DECODING:
        prepare()
    if isinstance(sys.stdout, io.TextIOWrapper):  # an answer may hold any character, whatever the terminal's encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with terminate_as_interrupt():
            return _COMMANDS[args.command].run(args)
    except InputError as error:
        return fail(str(error))
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return fail("out of memory: expected fewer --slots, a smaller --max-length or shorter prompts", FAILED)
    except BrokenPipeError:  # whoever read standard output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except KeyboardInterrupt as interrupt:
        print(f"aspire: interrupted{', ' if str(interrupt) else ''}{interrupt}", file=sys.stderr)
        return INTERRUPTED


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("aspire-jax")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def fail(message: str, code: int = BAD_INPUT) -> int:
    """Prints one line on standard error; returns `code`."""
    print(f"aspire: error: {' '.join(message.split())}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Errors in one line, as those of every command."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(fail(f"{message} (see {self.prog} --help)"))
