"""What `load` accepts, and what it says otherwise. The package itself imports little."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

import aspire_jax
from aspire_jax import InputError
from tests.api import models
from tests.fixtures import cases


def test_a_converted_folder(folder, model):
    assert model.config == models.CONFIG and model.name == "tiny" and model.dtype == "float32"
    assert len(model.params["layers"]) == models.CONFIG.n_layers
    half = aspire_jax.load(str(folder), dtype="bfloat16")
    assert half.dtype == "bfloat16" and {str(x.dtype) for x in jax.tree.leaves(half.params)} == {"bfloat16"}


def test_without_its_tokenizer(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("model.json", "params"):
        (copy / name).symlink_to(folder / name)
    assert aspire_jax.load(copy).tokenizer is None


def test_what_is_not_converted_is_refused_with_the_command_that_does_it(tmp_path):
    hf = cases.write_folder(tmp_path / "hf", "llama-default-tied")
    with pytest.raises(
        InputError, match=f"{hf}: a Hugging Face folder, expected .* run `aspire convert {hf} DST` first"
    ):
        aspire_jax.load(hf)
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(InputError, match="a GGUF file, expected a converted folder: run `aspire convert"):
        aspire_jax.load(gguf)
    with pytest.raises(InputError, match=r"no model\.json there"):
        aspire_jax.load(tmp_path)
    with pytest.raises(InputError, match="model: 'nowhere', expected a converted folder or one of smollm2-135m"):
        aspire_jax.load("nowhere")
    with pytest.raises(InputError, match="dtype: 'int8', expected one of float32"):
        aspire_jax.load(tmp_path, dtype="int8")


def test_every_public_name_is_there_and_imported_on_use():
    code = (
        "import sys, aspire_jax; assert 'jax' not in sys.modules; [getattr(aspire_jax, n) for n in aspire_jax.__all__]"
    )
    code += "; assert 'transformers' not in sys.modules and 'convert' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    assert set(aspire_jax.pure.__all__) <= set(dir(aspire_jax.pure))
    with pytest.raises(AttributeError, match="nothing"):
        aspire_jax.nothing  # noqa: B018
