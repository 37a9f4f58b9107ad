"""`python -m convert SRC DST`, and the pieces of it that `aspire convert` reuses."""

from __future__ import annotations

import argparse
import contextlib
import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aspire_jax.errors import InputError, written_or_standard
from aspire_jax.interrupt import terminate_as_interrupt
from convert.progress import Progress, Reporter, silent

if TYPE_CHECKING:
    from convert.manifest import Manifest

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the conversion to `parser`."""
    parser.add_argument("src", metavar="SRC", help="Hugging Face folder or GGUF file; with --to hf a converted folder")
    parser.add_argument("dst", metavar="DST", help="folder to create")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of every parameter (default: the source's; float32 for a quantised GGUF)",
    )
    parser.add_argument("--to", choices=("orbax", "hf"), default="orbax", help="format of DST (default: orbax)")
    parser.add_argument("--no-tokenizer", action="store_true", help="convert the weights alone")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument(
        "--json",
        type=written_or_standard,
        metavar="FILE",
        help="write the manifest as JSON; - for standard output alone",
    )


def run(args: argparse.Namespace) -> int:
    """Converts as `add_arguments` parsed it. Returns the exit code: 0, 2 for bad input, 130 where interrupted."""
    try:
        with terminate_as_interrupt(), contextlib.ExitStack() as stack:
            quiet = args.quiet or args.json == "-"
            progress = silent if quiet else stack.enter_context(Reporter())
            manifest = _convert(args, progress)
            if args.json == "-":
                sys.stdout.write(manifest.to_json())
            elif args.json:
                Path(args.json).write_text(manifest.to_json(), encoding="utf-8")
    except InputError as error:
        return _fail(str(error), BAD_INPUT)
    except OSError as error:
        return _fail(_describe(error, args.dst), BAD_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted, nothing was written", INTERRUPTED)
    if not quiet:
        print(f"{args.dst}: {manifest.family}, {manifest.parameters:,} parameters, {manifest.dtype}")
    return OK


def _convert(args: argparse.Namespace, progress: Progress) -> Manifest:
    from convert import convert, to_hf  # after parsing, so that --help does not wait for jax

    action = to_hf if args.to == "hf" else convert
    return action(args.src, args.dst, dtype=args.dtype, tokenizer=not args.no_tokenizer, progress=progress)


def _describe(error: OSError, dst: str) -> str:
    full = error.errno == errno.ENOSPC or "No space left on device" in str(error)
    where = error.filename or dst
    return f"{where}: disk full, nothing was written" if full else f"{where}: {error.strerror or error}"


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m convert", description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
