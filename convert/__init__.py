"""Foreign checkpoints (Hugging Face safetensors, GGUF) to Orbax and back; the only place that knows their layouts."""

from aspire_jax.errors import InputError
from convert.aliases import ALIASES, resolve
from convert.manifest import Manifest
from convert.pipeline import convert
from convert.source import read_config
from convert.to_hf import to_hf

__all__ = ["ALIASES", "InputError", "Manifest", "convert", "read_config", "resolve", "to_hf"]
