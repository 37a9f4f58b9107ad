"""The one exception that means the input is at fault and the program is not."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: one line that names the file, the field, the value and what was expected.

    The command lines print it and exit with code 2, without a traceback. Line breaks in `message` (they come
    from foreign error texts) are folded into spaces, so that it stays one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))
