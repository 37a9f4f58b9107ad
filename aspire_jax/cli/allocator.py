"""Memory settings of a command's own process: huge pages, and buffers that stay where they were.

glibc takes them from the environment before `main`, so the process starts itself again with them: the same process
number, the same arguments, a few milliseconds, before anything heavy is imported. What they bring is in
docs/architecture.md ("What XLA wants on a CPU"). A process that merely imports the library keeps its own settings.
"""

from __future__ import annotations

import os
import platform
import sys

VARIABLE = "GLIBC_TUNABLES"
# Huge pages for whatever is large. A run of steps takes its temporaries from the heap and finds them there the next
# time, instead of fresh pages; only what is larger (weights, the cache) has a mapping of its own and goes back when
# freed.
SETTINGS = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        f"glibc.malloc.mmap_threshold={1 << 28}",
        f"glibc.malloc.trim_threshold={1 << 30}",
        f"glibc.malloc.top_pad={1 << 26}",
    )
)


def settle() -> None:
    """Starts this process again with `SETTINGS`. Returns where that is of no use, not possible or already done.

    It is done, or the user's own choice, where the environment has the variable: an empty one switches this off.
    """
    if VARIABLE in os.environ or platform.libc_ver()[0] != "glibc" or not sys.executable:
        return
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: SETTINGS})
    except OSError:  # no such system call here: the command runs all the same
        return
