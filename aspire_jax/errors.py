"""Input at fault: the one exception that says so, and the check of files that a command is to write."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


class InputError(ValueError):
    """Bad input: one line that names the file, the field, the value and what was expected.

    The command lines print it and exit with code 2, without a traceback. Line breaks in `message` (they come
    from foreign error texts) are folded into spaces, so that it stays one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


def written(text: str) -> str:
    """An argument's type: a file to write at the end of a run, refused before it where that could not be.

    It is written by renaming another over it, which would put a file in the place of a device or a pipe.
    """
    path = Path(text)
    try:
        if not text or path.is_dir() or not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r}, expected a file name in a folder that exists")
        if path.exists() and not path.is_file():
            raise argparse.ArgumentTypeError(f"{text!r}, expected a file, not a device or a pipe")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}, expected a file") from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a folder that may be written to")
    return text


def written_or_standard(text: str) -> str:
    """As `written`; - is standard output."""
    return text if text == "-" else written(text)
