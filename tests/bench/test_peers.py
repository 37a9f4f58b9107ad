"""bench.peers: GGUF files for llama.cpp, the other programs' answers on a tiny model, and which differences count."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from bench import machine, peers, peers_llama_cpp, peers_transformers
from convert.gguf_file import read_gguf
from tests.fixtures import cases, gguf_files

CASE = "llama-llama3"  # 7 heads of 32 over one KV head, and a rope that a program must know of
NEW = 12


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gguf_with_full_matrices(tmp_path, dtype):
    source = gguf_files.write_gguf(tmp_path / "q.gguf", CASE, kind=Kind.BF16)
    peers_llama_cpp.write_gguf(source, tmp_path / "full.gguf", dtype)
    before, after = read_gguf(source), read_gguf(tmp_path / "full.gguf")
    assert after.metadata.pop("general.file_type") == {"float32": 0, "float16": 1}[dtype]
    assert after.metadata == before.metadata and list(after.tensors) == list(before.tensors)
    for name, tensor in after.tensors.items():
        assert tensor.kind == ("F16" if dtype == "float16" and len(tensor.shape) > 1 else "F32")
        values, right = (t.read(np.dtype(np.float32)) for t in (tensor, before.tensors[name]))
        np.testing.assert_array_equal(values, right.astype(dtype if values.ndim > 1 else "float32"))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return list(rng.integers(3, cases.CASES[CASE]["vocab_size"], (2, 20)))


@pytest.fixture(scope="module")
def answers(tmp_path_factory, prompts):
    pytest.importorskip("torch")
    folder = cases.write_folder(tmp_path_factory.mktemp("hf") / "hf", CASE)
    model = peers_transformers.Transformers(folder, threads=1)
    answers, prefill, decode = model.generate(prompts, NEW)
    assert [len(a) for a in answers] == [NEW, NEW] and prefill > 0 and decode > 0
    looked_up, _, _ = model.generate(prompts[:1], NEW, lookup=True)
    assert looked_up == answers[:1]
    return answers


def test_llama_cpp_answers_as_transformers(tmp_path, prompts, answers):
    pytest.importorskip("llama_cpp")
    tensors = gguf_files.gguf_tensors(CASE)
    for name in ("token_embd.weight", "output.weight"):  # llama.cpp wants a row for every token of the tokenizer
        more = cases.tokenizer().get_vocab_size() - len(tensors[name])
        tensors[name] = np.pad(tensors[name], ((0, more), (0, 0)))
    file = gguf_files.write_gguf(tmp_path / "m.gguf", CASE, tensors=tensors)
    model = peers_llama_cpp.LlamaCpp(file, dtype="float32", threads=1)
    together, prefill, decode = model.generate(prompts, NEW)
    assert together == answers and prefill > 0 and decode > 0
    assert model.generate(prompts[:1], NEW)[0] == answers[:1]
    model.close()


def test_a_first_difference_counts_by_its_margin():
    margins = [np.array([1.0, 1e-4, 1.0])] * 4
    right = [[1, 2, 3]] * 4
    others = [[1, 2, 3], [1, 9, 3], [1, 2, 9], [1, 2]]  # equal, at a tie, at no tie, shorter
    found = peers.compared(right, margins, others, 1e-3)
    assert found == {"answers": 4, "equal": 1, "unexplained": 2, "margins": [1e-4, 1.0, None]}


def test_what_is_missing_is_named(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *more, **fields):
        if name in ("torch", "llama_cpp"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *more, **fields)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "expected: pip install 'aspire-jax[peers]'" in peers_llama_cpp.missing()
    assert "expected: pip install 'aspire-jax[parity]'" in peers_transformers.missing()


def test_the_whole_of_it_on_a_tiny_model(folder, data, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from aspire_jax.cli import setup

    monkeypatch.setattr(setup, "use_compile_cache", lambda: None)
    monkeypatch.setattr(machine, "rates", lambda repeats=5: {"read_gb_s": 10.0, "matmul_gflop_s": 100.0})
    arguments = ["--model", str(folder), "--data", *data, "--contexts", "40", "--batches", "1", "2", "--seeds", "2"]
    arguments += ["--max-tokens", "8", "--methods", "autoregressive", "--json", str(tmp_path / "x.json")]
    assert peers.command.run(peers.parser(), peers.measure, peers.draw, arguments, peers.passed) == 0
    results = json.loads((tmp_path / "x.json").read_text())
    assert "llama.cpp" in results["left_out"] and results["unexplained"] == [] and "torch" in str(results["versions"])
    one, two = results["cells"]
    lookup = "transformers, prompt lookup"
    assert [p["program"] for p in one["programs"]] == ["autoregressive", "transformers", lookup]
    assert [p["program"] for p in two["programs"]] == ["autoregressive", "transformers"]
    for cell, answers in ((one, 2), (two, 4)):
        assert all(38 < length <= 40 for length in cell["prompt_tokens"])
        for row in cell["programs"]:
            assert row["answers"] == answers and row["equal"] + len(row["margins"]) == answers
            assert all(len(row[f"{kind}_tokens_per_second"]["values"]) == 2 for kind in ("decode", "prefill"))
    assert "left out: llama.cpp: " in capsys.readouterr().out


def test_refused(folder, data, capsys):
    common = ["--model", str(folder), "--data", *data, "--contexts", "40", "--batches", "1", "--seeds", "1"]
    for more, message in (
        (["--threads", "0"], "--threads: 0, expected 1 to"),
        (["--methods", "aspire"], "--methods: aspire, expected autoregressive and others of"),
    ):
        assert peers.command.run(peers.parser(), peers.measure, peers.draw, [*common, *more], peers.passed) == 2
        assert message in capsys.readouterr().err
