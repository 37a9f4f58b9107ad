"""transformers with torch on the same weights, for `bench.peers`: `generate`, plain and with prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Tokens that prompt lookup proposes at a time: what transformers' documentation uses.
LOOKUP = 10


class Transformers:
    """A loaded model.

    Attributes:
      version: of both packages.
    """

    def __init__(self, folder: Path, *, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._torch = torch
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        # The answer's length is what is asked for; nothing ends it early and nothing is sampled.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def generate(
        self, prompts: Sequence[np.ndarray], new: int, *, lookup: bool = False
    ) -> tuple[list[list[int]], float, float]:
        """Greedy answers of `new` tokens to prompts of one length.

        Returns:
          the answers, the seconds until the first tokens, and those after.
        """
        tokens = self._torch.tensor(np.stack(prompts).astype(np.int64))
        first: list[float] = []

        def note(*_: Any, **__: Any) -> Any:
            first.append(time.perf_counter())
            return self._torch.zeros(len(prompts), dtype=self._torch.bool)

        options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP} if lookup else {}
        start = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(
                tokens,
                attention_mask=self._torch.ones_like(tokens),
                max_new_tokens=new,
                stopping_criteria=[note],
                **options,
            )
        end = time.perf_counter()
        answers = out[:, tokens.shape[1] :].tolist()
        return answers, first[0] - start, end - first[0]


def missing() -> str | None:
    """Why transformers cannot take part, or None."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return f"torch is not installed ({error}), expected: pip install 'aspire-jax[parity]'"
    return None
