"""llama.cpp on the same weights, for `bench.peers`: through llama-cpp-python's bindings of its C interface.

The weights are those of a GGUF file with every matrix as float32 or float16; keys and values are kept in the same type.
Prompts are prefilled one after the other, then all rows decode together, a token each a call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Tokens of a prompt that one call takes: llama.cpp's own default.
_BATCH = 512


def write_gguf(source: Path, target: Path, dtype: str) -> None:
    """Copies a GGUF file with its matrices as `dtype` ("float32" or "float16"); vectors become float32.

    Quantised tensors are decoded, so that their values are those that `convert` reads.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        if name not in ("general.file_type", "general.quantization_version"):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    kinds = {"float32": gguf.LlamaFileType.ALL_F32, "float16": gguf.LlamaFileType.MOSTLY_F16}
    writer.add_file_type(kinds[dtype])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A loaded model.

    Attributes:
      version: of the bindings.
    """

    def __init__(self, file: Path, *, dtype: str, threads: int) -> None:
        import llama_cpp

        self._c = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive: llama.cpp calls it
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise OSError(f"{file}: llama.cpp does not load it")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._type = llama_cpp.GGML_TYPE_F32 if dtype == "float32" else llama_cpp.GGML_TYPE_F16
        self._threads = threads
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def close(self) -> None:
        """Frees the model."""
        self._c.llama_model_free(self._model)

    def generate(self, prompts: Sequence[np.ndarray], new: int) -> tuple[list[list[int]], float, float]:
        """Greedy answers of `new` tokens, and the seconds of prefill (all prompts, first tokens) and of decoding."""
        c, rows = self._c, len(prompts)
        params = c.llama_context_default_params()
        longest = max(len(p) for p in prompts) + new
        params.n_ctx = rows * -(-longest // 256) * 256  # divided evenly among the rows
        params.n_batch = params.n_ubatch = _BATCH
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = self._type
        context = c.llama_init_from_model(self._model, params)
        if not context:
            raise MemoryError(f"llama.cpp: no context of {params.n_ctx} tokens")
        batch = c.llama_batch_init(_BATCH, 0, 1)
        try:
            start = time.perf_counter()
            last = [self._prefill(context, batch, row, prompt) for row, prompt in enumerate(prompts)]
            prefilled = time.perf_counter()
            answers = [[token] for token in last]
            for step in range(new - 1):
                for row, prompt in enumerate(prompts):
                    self._put(batch, row, answers[row][-1], len(prompt) + step, row, wanted=True)
                batch.n_tokens = rows
                self._decode(context, batch)
                for row in range(rows):
                    answers[row].append(self._best(context, row))
            return answers, prefilled - start, time.perf_counter() - prefilled
        finally:
            c.llama_batch_free(batch)
            c.llama_free(context)

    def _prefill(self, context: Any, batch: Any, row: int, prompt: np.ndarray) -> int:
        for begin in range(0, len(prompt), _BATCH):
            part = prompt[begin : begin + _BATCH]
            for i, token in enumerate(part):
                self._put(batch, i, int(token), begin + i, row, wanted=begin + i == len(prompt) - 1)
            batch.n_tokens = len(part)
            self._decode(context, batch)
        return self._best(context, batch.n_tokens - 1)

    def _put(self, batch: Any, i: int, token: int, position: int, row: int, *, wanted: bool) -> None:
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, row

    def _decode(self, context: Any, batch: Any) -> None:
        code = self._c.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def _best(self, context: Any, i: int) -> int:
        logits = np.ctypeslib.as_array(self._c.llama_get_logits_ith(context, i), (self._vocabulary,))
        return int(np.argmax(logits))


def missing() -> str | None:
    """Why llama.cpp cannot take part, or None."""
    try:
        import llama_cpp  # noqa: F401
    except (ImportError, OSError) as error:
        return f"llama-cpp-python is not installed ({error}), expected: pip install 'aspire-jax[peers]'"
    return None
