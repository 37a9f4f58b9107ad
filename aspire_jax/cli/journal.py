"""The output of a long run, so written that an interruption at any point loses nothing and repeats nothing.

While a run goes on, finished lines are appended to OUTPUT.partial in the order in which they finish, each forced to
disk, behind a first line that says which input and settings they belong to. At the end they are written to OUTPUT in
the order of the input, under a temporary name that is then renamed. A half-written last line is what a crash leaves:
it is cut off when the run is resumed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from aspire_jax.cli.requests_file import parse
from aspire_jax.errors import InputError

_HEADER = "aspire_run"
# JSON allows these three in a string as they are, but str.splitlines and its like end a line at them.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}

# A line's request and which of its completions it is.
Key = tuple[str | int, int]


def remembered(output: str | Path, name: str) -> Any:
    """A setting of the interrupted run that writes `output`; None where there is none that can be read."""
    try:
        with _partial(Path(output)).open("rb") as file:
            header = json.loads(file.readline()).get(_HEADER)
        return header.get(name) if isinstance(header, dict) else None
    except (OSError, ValueError, AttributeError):
        return None


class Journal:
    """Finished lines of a run.

    Attributes:
      done: the lines that exist already, by id and choice.
      complete: whether OUTPUT itself was finished by an earlier run; nothing is left to do.
    """

    def __init__(self, output: str | Path, keys: Sequence[Key], settings: Mapping[str, Any]) -> None:
        """Touches nothing yet.

        Args:
          keys: of the completions, in the order of the input.
          settings: what decides the lines' content; an interrupted run with others is not continued.
        """
        self.output = Path(output)
        self.partial = _partial(self.output)
        self.done: dict[Key, dict[str, Any]] = {}
        self.complete = False
        self._keys, self._settings = list(keys), json.loads(json.dumps(dict(settings)))
        self._good = 0  # bytes of the partial file to go on behind
        self._file: BinaryIO | None = None

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuses what would destroy an earlier run's work, or mix it with another's.

        Raises:
          InputError: an output or an interrupted run is there and neither option says what to do with it, or the
            interrupted run had other settings.
        """
        if not self.output.parent.is_dir():
            raise InputError(f"{self.output}: no folder {self.output.parent}, expected one that exists")
        if self.output.is_dir():
            raise InputError(f"{self.output}: a folder, expected a file name")
        if overwrite:
            return
        if resume and self.partial.exists():
            self._read()
        elif resume and self.output.exists():
            self.complete = self._is_complete()
            if not self.complete:
                raise InputError(f"{self.output}: exists and is not this input's output, expected --overwrite")
        elif self.partial.exists():
            raise InputError(f"{self.partial}: of an interrupted run, expected --resume or --overwrite")
        elif self.output.exists():
            raise InputError(f"{self.output}: exists, expected --overwrite or another name")

    def __enter__(self) -> Self:
        """Opens the partial file, behind the whole lines it has.

        Raises:
          InputError: another process writes it.
        """
        self._file = self.partial.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise InputError(f"{self.partial}: another process writes it, expected one at a time") from error
        self._file.truncate(self._good)  # a half-written line goes, or an older run's work that is not wanted
        if not self._good:
            self._append(_line({_HEADER: self._settings}))
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, line: dict[str, Any]) -> None:
        """Appends one finished line, and returns when it is on disk."""
        self._append(_line(line))
        self.done[line["id"], line["choice"]] = line

    def finish(self) -> None:
        """Writes the output, in the order of the input, and removes the partial file."""
        temporary = self.output.with_name(f".{self.output.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.writelines(_line(self.done[key]) for key in self._keys)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.output)
        finally:
            temporary.unlink(missing_ok=True)
        self.partial.unlink()

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> None:
        """Takes in the partial file."""
        lines = self.partial.read_bytes().split(b"\n")[:-1]  # what follows the last line break was not finished
        if not lines:  # stopped before its first line was whole: nothing was done
            return
        self._good = len(lines[0]) + 1
        header = parse(lines[0], f"{self.partial}:1").get(_HEADER)
        if not isinstance(header, dict):
            raise InputError(f"{self.partial}:1: not the first line of an interrupted run, expected --overwrite")
        for name in {**header, **self._settings}:
            if header.get(name) != self._settings.get(name):
                now, then = (json.dumps(x.get(name)) for x in (self._settings, header))
                raise InputError(f"{self.partial}: {name}: {now}, expected {then} as in the interrupted run")
        known, ids = set(self._keys), {name for name, _ in self._keys}
        for number, text in enumerate(lines[1:], start=2):
            line = parse(text, f"{self.partial}:{number}")
            name, choice = line.get("id"), line.get("choice")
            if not isinstance(name, str | int) or name not in ids:
                raise InputError(f"{self.partial}:{number}: id: {json.dumps(name)}, expected one of the input's")
            if not isinstance(choice, int) or (name, choice) not in known:
                raise InputError(
                    f"{self.partial}:{number}: choice: {json.dumps(choice)}, expected one that was asked for"
                )
            self.done.setdefault((name, choice), line)
            self._good += len(text) + 1

    def _is_complete(self) -> bool:
        lines = self.output.read_bytes().split(b"\n")
        try:
            found = [parse(line, str(self.output)) for line in lines if line]
        except InputError:
            return False
        return [(line.get("id"), line.get("choice")) for line in found] == self._keys


def _partial(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def _line(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.translate(_ESCAPES).encode("utf-8") + b"\n"
