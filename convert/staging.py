"""Output folders that exist whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aspire_jax.errors import InputError


@contextlib.contextmanager
def new_folder(dst: Path) -> Iterator[Path]:
    """A temporary sibling of `dst` to write into; renamed to `dst` at the end, removed on any failure.

    Parents of `dst` that do not exist are made, and removed again on failure.

    Raises:
      InputError: `dst` exists, before or after the writing.
    """
    dst = dst.absolute()
    if os.path.lexists(dst):
        raise InputError(f"{dst}: exists, expected a name that is free")
    made = _make_parents(dst.parent)
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{dst.name}.partial-", dir=dst.parent))
        try:
            work.chmod(0o777 & ~_umask())  # mkdtemp makes it private
            yield work
            if os.path.lexists(dst):
                raise InputError(f"{dst}: was made by somebody else meanwhile")
            work.rename(dst)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    except BaseException:
        for parent in reversed(made):
            with contextlib.suppress(OSError):  # somebody else may use it by now
                parent.rmdir()
        raise


def _make_parents(folder: Path) -> list[Path]:
    missing = [parent for parent in (*reversed(folder.parents), folder) if not parent.exists()]
    for parent in missing:
        parent.mkdir(exist_ok=True)
    return missing


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
