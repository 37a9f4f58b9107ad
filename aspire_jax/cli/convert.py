"""aspire convert: a Hugging Face folder or a GGUF file to a folder that the other commands load, and back."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    from convert import __main__ as convert

    convert.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from convert import __main__ as convert

    return convert.run(args)
