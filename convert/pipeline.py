"""The conversion itself: foreign tensors in, an Orbax folder out, one layer's leaf in memory at a time."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from aspire_jax import checkpoint, params
from aspire_jax.errors import InputError
from convert import layouts, manifest, tokenizer_files
from convert.manifest import Manifest
from convert.names import Part
from convert.progress import Progress, silent
from convert.source import Source, open_source
from convert.staging import new_folder


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: bool = True,
    progress: Progress = silent,
) -> Manifest:
    """Converts a Hugging Face folder or a GGUF file into a folder that `aspire_jax.checkpoint` loads.

    Memory: three times the largest group of tensors (one layer's fused projection, or the embedding) at the most.
    The folder appears under its name when it is complete, or not at all.

    Args:
      src: a folder with config.json, safetensors and tokenizer.json, or a GGUF file.
      dst: the folder to create; must not exist.
      dtype: "float32", "bfloat16" or "float16" for every parameter; None keeps the source's (float32 for a
        quantised GGUF, which is exact).
      tokenizer: whether the tokenizer is part of the result; where it is, its absence is an error.
      progress: called with stage, bytes done and bytes in all.

    Returns:
      The manifest, as written to `dst`/manifest.json.

    Raises:
      InputError: bad input; names the file and the tensor or field.
      OSError: the disk refused.
    """
    src, dst = Path(src), Path(dst)
    if dtype is not None and dtype not in checkpoint.DTYPES:
        raise InputError(f"dtype: {dtype!r}, expected one of {', '.join(checkpoint.DTYPES)}")
    with new_folder(dst) as work:
        source = open_source(src)
        dtype = dtype or source.natural_dtype
        checkpoint.save_config(work, source.config)
        used = tokenizer_files.write(source, work) if tokenizer else []
        _write_params(source, work, dtype, progress)
        files = []
        total = sum(file.stat().st_size for file in source.files)
        for entry in manifest.digest(sorted({*source.files, *used})):
            files.append(entry)
            progress("checksums", min(total, sum(file.size for file in files)), total)
        result = Manifest(
            source=src.resolve().name,
            kind=source.kind,
            target="orbax",
            family=source.config.family,
            dtype=dtype,
            parameters=params.count(source.config),
            tensors=len(source.parts),
            files=tuple(files),
            versions=manifest.versions(),
        )
        (work / manifest.FILE).write_text(result.to_json(), encoding="utf-8")
    return result


def _write_params(source: Source, work: Path, dtype: str, progress: Progress) -> None:
    config, kind = source.config, np.dtype(jnp.dtype(dtype))
    writer = checkpoint.Writer(work, config, dtype)
    total = sum(tensor.size for tensor in source.parts.values())
    done = 0

    def put(leaf: str, layer: int | None, parts: list[Part]) -> None:
        nonlocal done
        arrays = [source.read(part, kind) for part in parts]
        name = leaf if layer is None else f"layers.{leaf}"
        writer.write(name, layer, arrays[0] if layer is None else layouts.pack(config, leaf, arrays))
        done += sum(source.parts[part].size for part in parts)
        progress("weights", done, total)

    put("embed", None, [Part("embed", None)])
    for layer in range(config.n_layers):
        for leaf, roles in layouts.LAYER_LEAVES.items():
            if f"layers.{leaf}" in writer.shapes:
                put(leaf, layer, [Part(role, layer) for role in roles])
    put("final_norm", None, [Part("final_norm", None)])
    if not config.tie_embeddings:
        put("unembed", None, [Part("unembed", None)])
    writer.finish()
