"""Tokenizers rebuilt from GGUF metadata: splitting by name, SentencePiece by scores, special tokens by type."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from convert.gguf_file import GgufFile
from convert.gguf_tokenizer import build_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def _gguf(**fields: Any) -> GgufFile:
    return GgufFile(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in fields.items()}, {})


def _byte_level(pre: str, more: tuple[str, ...] = (), **fields: Any) -> Any:
    tokens = ["<unk>", "<s>", *BYTES, *more]
    types = [2, 3] + [1] * (len(tokens) - 2)
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": [], "token_type": types, "bos_token_id": 1}
    return build_tokenizer(_gguf(**{**values, **fields}))


TEXT = "I'm Don'T 12345 years,\n\n  old_x!?\t Ünïcode 中文字"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", "I|'m| Don|'|T| 12345| years|,|\n\n | old|_|x|!?|\t| Ünïcode| 中文字"),
        ("smollm", "I|'m| Don|'|T| |1|2|3|4|5| years|,|\n\n | old|_|x|!?|\t| Ünïcode| 中文字"),
        ("llama-bpe", "I|'m| Don|'T| |123|45| years|,\n\n| | old|_x|!?|\t| Ünïcode| 中文字"),
        ("qwen2", "I|'m| Don|'T| |1|2|3|4|5| years|,\n\n| | old|_x|!?|\t| Ünïcode| 中文字"),
        ("tekken", "I|'m| Don|'T| |1|2|3|4|5| years|,\n\n| | old|_x|!?|\t| Ünïcode| 中文字"),
    ],
)
def test_splitting(pre: str, pieces: str) -> None:
    tokenizer, _ = _byte_level(pre)
    found = tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in found] == pieces.split("|")
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_words_that_are_tokens_need_no_merges() -> None:
    """Llama 3's vocabulary has words that its merges do not reach."""
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        tokenizer, _ = _byte_level(pre, more=("hello",))
        assert (len(tokenizer.encode("hello", add_special_tokens=False).ids) == 1) is whole


def test_normalisation_of_qwen() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    qwen, _ = _byte_level("qwen2")
    llama, _ = _byte_level("llama-bpe")
    assert qwen.encode(decomposed).ids == qwen.encode(composed).ids
    assert llama.encode(decomposed).ids != llama.encode(composed).ids


@pytest.mark.parametrize(
    ("pre", "stated", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("smollm", True, True)],
)
def test_the_beginning_token(pre: str, stated: bool | None, begins: bool) -> None:
    tokenizer, config = _byte_level(pre, add_bos_token=stated)
    assert (tokenizer.encode("a").ids[0] == 1) is begins
    assert config["add_bos_token"] is begins and config["bos_token"] == "<s>"


def test_special_and_user_defined_tokens() -> None:
    tokens = ["<unk>", "<s>", *BYTES, "<tool>", "<pad>"]
    types = [2, 3] + [1] * len(BYTES) + [4, 5]
    tokenizer, _ = build_tokenizer(
        _gguf(model="gpt2", pre="gpt-2", tokens=tokens, merges=[], token_type=types, bos_token_id=1)
    )
    ids = tokenizer.encode("<tool>a<s><pad>").ids
    assert (ids[0], ids[2], len(ids)) == (len(tokens) - 2, 1, 3 + len("<pad>"))  # unused tokens are not matched
    assert tokenizer.decode(ids) == "<tool>a<pad>"


def test_a_ready_tokenizer_json_wins() -> None:
    inner, _ = _byte_level("qwen2")
    gguf = _gguf(model="gpt2", pre="unheard of", tokens=["a"])
    gguf.metadata["tokenizer.huggingface.json"] = inner.to_str()
    tokenizer, config = build_tokenizer(gguf)
    assert tokenizer.to_str() == inner.to_str() and "add_bos_token" not in config


def test_chat_template_and_special_names() -> None:
    gguf = _gguf(
        model="gpt2", pre="gpt-2", tokens=["<unk>", "<s>", "</s>", *BYTES], merges=[], bos_token_id=1, eos_token_id=2,
        unknown_token_id=0, padding_token_id=2,
    )  # fmt: skip
    gguf.metadata["tokenizer.chat_template"] = "{{ messages }}"
    _, config = build_tokenizer(gguf)
    assert [config[f"{name}_token"] for name in ("bos", "eos", "unk", "pad")] == ["<s>", "</s>", "<unk>", "</s>"]
    assert config["chat_template"] == "{{ messages }}"


# SentencePiece: pieces with scores, as its BPE trainer orders them.
WORDS = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "▁w", "or", "llo", "▁wor", "▁he", "▁hello", "ld", "▁world"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
TYPES = [2, 3, 3] + [6] * 256 + [1] * len(WORDS)
SCORES = [0.0] * 259 + [0.0] * 8 + [-float(i) for i in range(len(WORDS) - 8)]


def _sentencepiece(**fields: Any) -> Any:
    values = {"model": "llama", "tokens": PIECES, "scores": SCORES, "token_type": TYPES, "bos_token_id": 1}
    return build_tokenizer(_gguf(**{**values, **fields}))


def _reference(text: str) -> list[str]:
    """SentencePiece's BPE as it is defined: join the neighbours whose union scores best, leftmost first."""
    score = dict(zip(PIECES, SCORES, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [b for p in parts for b in ([p] if p in score else [f"<0x{byte:02X}>" for byte in p.encode()])]


@pytest.mark.parametrize("text", ["hello world", "hello", " hello  world", "held wordld", "héllo 🤗", "a\nb"])
def test_sentencepiece(text: str) -> None:
    tokenizer, _ = _sentencepiece()
    found = tokenizer.encode(text, add_special_tokens=False)
    assert found.tokens == _reference(text)
    assert tokenizer.decode(found.ids) == text


def test_sentencepiece_at_random() -> None:
    rng = np.random.default_rng(0)
    tokenizer, _ = _sentencepiece()
    for _ in range(300):
        text = "".join(rng.choice(list("helowrd "), rng.integers(1, 24)))
        assert tokenizer.encode(text, add_special_tokens=False).tokens == _reference(text), text


def test_sentencepiece_begins_with_its_token_and_a_space() -> None:
    tokenizer, config = _sentencepiece()
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    assert config["add_bos_token"] is True
    plain, _ = _sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert plain.encode("hello").tokens == ["he", "llo"]
    assert plain.decode(plain.encode(" hello").ids) == " hello"
