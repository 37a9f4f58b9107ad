"""Ahead-of-time compilation for an H200 where there is none: what XLA makes of a program, and what its kernels need.

Needs the CUDA plugin's wheels (`make gpu-compile` installs them) and no GPU: the target is a description of the device.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGET = Path(__file__).parent / "data" / "h200_target_config.txtpb"
ARCHITECTURE = "sm_90a"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled kernel: its name, registers a thread, bytes spilled, shared memory and threads of a block."""

    name: str
    registers: int
    spilled: int
    shared: int
    threads: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
      kernels: by name; a kernel that occurs several times counts once.
      temporary, aliased: bytes of temporaries, and of outputs that are donated inputs.
      text: the optimised program.
      memory: XLA's report of what lies in temporary memory.
      thunks: what the program launches, one a line, as XLA writes it; graphs: how many CUDA graphs it launches them by.
    """

    kernels: tuple[Kernel, ...]
    temporary: int
    aliased: int
    text: str
    memory: str
    thunks: str
    graphs: int = 0


class Target:
    """The described device, as one that programs are compiled for."""

    def __init__(self) -> None:
        topology = topologies.get_topology_desc(
            "h200", platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
        )
        self._mesh = Mesh(np.array(topology.devices).reshape(1), ("x",))
        self._home = NamedSharding(self._mesh, PartitionSpec())

    def at_home(self, tree: Any) -> Any:
        """The arrays' descriptions, placed on the device."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._home), tree)

    def compile(
        self, function: Callable[..., Any], *arguments: Any, options: dict[str, Any] | None = None, **jit: Any
    ) -> Compiled:
        """Compiles `function` for `arguments` (see `at_home`); `jit`: arguments of `jax.jit`."""
        with tempfile.TemporaryDirectory() as folder, jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            lowered = jax.jit(function, **jit).trace(*arguments).lower()
            dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx", "xla_gpu_autotune_level": 0}
            done = lowered.compile({**dump, **(options or {})})
            sizes = done.memory_analysis()
            files = Path(folder)
            thunks = _last(files, "*.thunk_sequence.txt")
            return Compiled(
                _kernels(files, thunks),
                sizes.temp_size_in_bytes,
                sizes.alias_size_in_bytes,
                done.as_text(),
                _last(files, "*memory-usage-report.txt"),
                thunks,
                _last(files, "*.thunk_sequence_after_thunk_passes.txt").count("kCommandBuffer"),
            )


def _last(folder: Path, pattern: str) -> str:
    found = sorted(folder.glob(pattern))
    return found[-1].read_text() if found else ""


def ptxas() -> str:
    """The assembler that counts registers: the plugin's, or the one on PATH."""
    installed = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "ptxas"
    found = str(installed) if installed.exists() else shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("ptxas: not found, expected the nvidia-cuda-nvcc wheel or a CUDA toolkit on PATH")
    return found


def _kernels(folder: Path, thunks: str) -> tuple[Kernel, ...]:
    launches = re.findall(r"kCustomKernel.*\] (\S+) grid: .* threads: \[(\d+).*shared_memory: (\d+)", thunks)
    launched = {name: (int(threads), int(shared)) for name, threads, shared in launches}
    found = {}
    for ptx in folder.glob("*.ptx"):
        done = subprocess.run(
            [ptxas(), "-v", f"-arch={ARCHITECTURE}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
        for name, spilled, registers in re.findall(pattern, done.stdout + done.stderr, re.DOTALL):
            threads, shared = launched.get(name, (0, 0))
            found[name] = Kernel(name, int(registers), int(spilled), shared, threads)
    return tuple(found[name] for name in sorted(found))
