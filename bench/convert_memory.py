"""Peak memory of a conversion against its bound, on a synthetic checkpoint.

    python -m bench.convert_memory [--gib 2] [--json FILE] [--plot FILE] [--quick]

Makes a random Llama-shaped Hugging Face folder in a temporary directory, converts it in a process of its own and
compares that process's largest resident size with the bound: three times the largest group of tensors (one
layer's fused projection or the embedding, in the wider of the two dtypes) plus 1 GiB. The whole model is larger
than the bound, so a converter that held it would show.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from aspire_jax.errors import InputError
from bench import command, machine, plots

GIB = 2**30
D_MODEL, D_FF, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 5632, 16, 4, 128, 32000
BYTES = {"bfloat16": 2, "float32": 4}

# Converts, then prints its own peak in bytes. The kernel's ru_maxrss is of no use where it can be avoided: a child
# inherits its parent's.
_CHILD = """
import pathlib, resource, sys
from convert.__main__ import main
code = main(sys.argv[1:])
status = pathlib.Path("/proc/self/status")
if status.exists():
    print(next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM")))
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


def main() -> int:
    parser = command.parser("convert_memory", __doc__, quick="half a GiB", plot="peak and bound of each conversion")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the synthetic checkpoint (bfloat16)")
    return command.run(parser, _measure, draw, passed=passed)


def passed(results: dict[str, Any]) -> bool:
    """Whether every conversion stayed below its bound."""
    return all(row["peak_gib"] <= row["bound_gib"] for row in results["runs"])


def _measure(args: argparse.Namespace, say: command.Say) -> dict[str, Any]:
    if not 0 < args.gib < 1000:
        raise InputError(f"--gib: {args.gib}, expected a size above 0")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), min(args.gib, 0.5) if args.quick else args.gib)
    for row in results["runs"]:
        say(
            f"{row['route']:>30}: peak {row['peak_gib']:.2f} GiB, bound {row['bound_gib']:.2f}, model "
            f"{row['model_gib']:.2f}, {row['seconds']:.1f} s, {row['gib_per_second']:.2f} GiB/s"
        )
    return results


def draw(results: dict[str, Any], file: str) -> None:
    """Peak memory of each route beside its bound and the model's size."""
    made, (axes,) = plots.figure("Peak memory of a conversion, and its bound", width=8)
    series = {"peak": "peak_gib", "bound": "bound_gib", "the model itself": "model_gib"}
    rows = results["runs"]
    plots.bars(
        axes,
        [row["route"].replace(" to ", "\nto ") for row in rows],
        {name: [row[key] for row in rows] for name, key in series.items()},
        label="GiB",
    )
    plots.legend(axes)
    plots.note(made, plots.where(results))
    plots.save(made, file)


def measure(folder: Path, gib: float) -> dict[str, Any]:
    """Converts a checkpoint of `gib` GiB to bfloat16, to float32, and back to Hugging Face."""
    layers = write_checkpoint(folder / "hf", gib)
    runs = [
        convert(folder / "hf", folder / "bf16", "safetensors bf16 to Orbax bf16", "bfloat16", layers),
        convert(folder / "bf16", folder / "back", "Orbax bf16 to safetensors", "bfloat16", layers, "--to", "hf"),
    ]
    for done in (folder / "bf16", folder / "back"):
        subprocess.run(["rm", "-r", str(done)], check=True)
    runs.append(convert(folder / "hf", folder / "f32", "safetensors bf16 to Orbax f32", "float32", layers))
    return {"machine": machine.describe(), "seed": 0, "runs": runs}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the synthetic model."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (D_MODEL,),
        "self_attn.q_proj.weight": (q, D_MODEL),
        "self_attn.k_proj.weight": (kv, D_MODEL),
        "self_attn.v_proj.weight": (kv, D_MODEL),
        "self_attn.o_proj.weight": (D_MODEL, q),
        "post_attention_layernorm.weight": (D_MODEL,),
        "mlp.gate_proj.weight": (D_FF, D_MODEL),
        "mlp.up_proj.weight": (D_FF, D_MODEL),
        "mlp.down_proj.weight": (D_MODEL, D_FF),
    }
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, D_MODEL)}
    for index in range(layers):
        out |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return out | {"model.norm.weight": (D_MODEL,), "lm_head.weight": (VOCAB, D_MODEL)}


def write_checkpoint(folder: Path, gib: float) -> int:
    """A single-file checkpoint of about `gib` GiB; returns its number of layers."""
    one, two = (sum(2 * int(np.prod(shape)) for shape in shapes(n).values()) for n in (1, 2))
    layers = max(1, round((gib * GIB - one) / (two - one)) + 1)
    folder.mkdir()
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": D_MODEL, "intermediate_size": D_FF,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes(layers).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for shape in shapes(layers).values():  # the upper halves of float32 are bfloat16
            values = rng.standard_normal(int(np.prod(shape)), np.float32) * np.float32(0.02)
            stream.write((values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes())
    return layers


def convert(src: Path, dst: Path, route: str, dtype: str, layers: int, *options: str) -> dict[str, Any]:
    """Runs the converter in a process of its own; returns what it took."""
    width = BYTES[dtype]
    largest = max(VOCAB * D_MODEL, 2 * D_FF * D_MODEL, (HEADS + 2 * KV_HEADS) * HEAD_DIM * D_MODEL) * width
    model = sum(int(np.prod(shape)) for shape in shapes(layers).values()) * width
    command = [str(src), str(dst), "--dtype", dtype, "--no-tokenizer", "--quiet", *options]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _CHILD, *command], stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{route}: exit code {done.returncode}")
    return {
        "route": route,
        "peak_gib": int(done.stdout) / GIB,
        "bound_gib": (3 * largest + GIB) / GIB,
        "largest_group_gib": largest / GIB,
        "model_gib": model / GIB,
        "seconds": seconds,
        "gib_per_second": model / GIB / seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
