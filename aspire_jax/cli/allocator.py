"""Memory settings of a command's own process: huge pages, and buffers that stay where they were.

glibc takes them from the environment before `main`, so the process starts itself again with them: the same process
number, the same arguments. A command does so before it imports anything heavy, in some 40 ms. What the settings bring
is in docs/architecture.md ("What XLA wants on a CPU").
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
# Huge pages for whatever is large. A run of steps takes its temporaries from the heap and finds them there the next
# time, instead of fresh pages; what is larger than the threshold has a mapping of its own and goes back when freed.
SETTINGS = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        f"glibc.malloc.mmap_threshold={1 << 25}",
        f"glibc.malloc.trim_threshold={1 << 28}",
        f"glibc.malloc.top_pad={1 << 26}",
    )
)
_SINCE = (2, 35)  # the first glibc with huge pages
_SETTLED = "aspire_settled"  # an option of the interpreter: it arrives even where the variable does not


def settle() -> None:
    """Starts this process again with `SETTINGS`. Returns where that is of no use, not possible or already done.

    It is the user's own choice where the environment has the variable, an empty one too, or one of malloc's own
    (`MALLOC_TRIM_THRESHOLD_` and its like).
    """
    chosen = VARIABLE in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or _SETTLED in sys._xoptions or not _takes_settings() or not _own_process():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [sys.executable, "-X", _SETTLED, *sys.orig_argv[1:]]
    try:
        os.execve(sys.executable, arguments, {**os.environ, VARIABLE: SETTINGS})
    except OSError:  # no such system call here: the command runs all the same
        return


def _takes_settings() -> bool:
    """Whether the C library is a glibc that knows all of `SETTINGS`."""
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(int(part) for part in version.split(".")[:2]) >= _SINCE


def _own_process() -> bool:
    """Whether the interpreter was started for the command alone: not for a script, notebook or debugger around it."""
    given, before = sys.argv[1:], sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    if not sys.executable or len(before) < 2 or sys.orig_argv[len(before) :] != given:
        return False
    module = "-m" in before and before.index("-m") == len(before) - 2
    return module or (before[-1] == sys.argv[0] and Path(sys.argv[0]).name == "aspire")
