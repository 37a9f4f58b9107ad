"""What every source of weights offers: named tensors with a shape, read one at a time in the dtype asked for."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from aspire_jax.errors import InputError

# The float types a tensor may be stored in without quantisation.
FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAME_OF = {str(dtype): name for name, dtype in FLOATS.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a file, not yet read.

    Attributes:
      name: its name in the file.
      file: the file it lies in.
      kind: how it is stored: "F32", "F16", "BF16" or a GGUF quantisation.
      shape: row-major (the last axis is contiguous).
      offset, size: its bytes in the file.
      decode: turns the bytes of whole rows into float32 [rows, row length]; None for the plain float kinds.
      row_bytes: bytes of one row (last axis), where `decode` is given.
    """

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray] | None = None
    row_bytes: int = 0

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The values as `dtype`, shape `self.shape`.

        Memory: the result, plus (where the dtype differs) a block of a few MiB. The file is read and not mapped,
        since mapped pages would count as this process's memory.

        Raises:
          InputError: the file ends early.
        """
        out = np.empty(self.shape, dtype)
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            if self.decode is None and FLOATS[self.kind] == dtype:
                self._fill(stream, out)
                return out
            width = self.shape[-1] if self.shape else 1
            stored = self.row_bytes or width * FLOATS[self.kind].itemsize
            rows = out.reshape(-1, width)
            block = max(1, _BLOCK_BYTES // max(1, width * 4))
            for start in range(0, rows.shape[0], block):
                raw = np.empty((min(block, rows.shape[0] - start), stored), np.uint8)
                self._fill(stream, raw)
                values = raw.view(FLOATS[self.kind]) if self.decode is None else self.decode(raw)
                with np.errstate(over="ignore"):  # float32 to float16 may overflow; `narrow` reports it
                    rows[start : start + block] = narrow(values, dtype, f"{self.file}: tensor {self.name}")
        return out

    def _fill(self, stream: io.BufferedReader, out: np.ndarray) -> None:
        view = out.reshape(-1).view(np.uint8).data
        got = stream.readinto(view) if len(view) else 0
        if got != len(view):
            raise InputError(f"{self.file}: tensor {self.name} ends after {got} of {len(view)} bytes, file truncated")


_BLOCK_BYTES = 8 << 20


def narrow(values: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """`values` as `dtype`.

    Raises:
      InputError: a finite value overflows `dtype`, named by `where`.
    """
    cast = values.astype(dtype)
    if dtype == np.float16 and not np.array_equal(np.isinf(cast), np.isinf(values)):
        raise InputError(f"{where}: a value lies outside float16, expected --dtype bfloat16 or float32")
    return cast
