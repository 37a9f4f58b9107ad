"""The tokenizer of a converted folder: bytes survive, streams equal whole decodings, chats follow the template."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from aspire_jax.errors import InputError
from aspire_jax.tokenizer import Tokenizer as Loaded
from aspire_jax.tokenizer import load_tokenizer
from tests.fixtures import cases

TEXTS = [
    "he said hello",
    "  two spaces, a\ttab\n\n and lines ",
    "Grüße, 你好, 🤗 family: 👨‍👩‍👧, flag 🇩🇪",
    "if x:\n        return x**2  # code",
    "",
    "\x00\x7f\u200b\ufeff",
]
Change = Callable[[dict[str, Any]], None]


def sentencepiece() -> Tokenizer:
    """Spaces as marks, one in front of the first word, bytes for what is unknown."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "▁he", "he"]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[("h", "e"), ("▁", "he")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    built = Tokenizer(model)
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1)
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    built.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return built


def folder(path: Path, built: Tokenizer, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    built.save(str(path / "tokenizer.json"))
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Loaded:
    built = cases.tokenizer() if request.param == "byte-level" else sentencepiece()
    return load_tokenizer(folder(tmp_path, built, bos_token="<s>", eos_token="</s>"))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(text: str, tokenizer: Loaded) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_attributes(tokenizer: Loaded) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, None)
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.token(2), tokenizer.token_id("</s>"), tokenizer.token_id("nothing")) == ("</s>", 2, None)
    assert tokenizer.token(tokenizer.vocab_size - 1) is not None
    assert tokenizer.token(tokenizer.vocab_size) is None


def test_special_tokens_are_left_out_unless_wanted(tokenizer: Loaded) -> None:
    ids = [1, *tokenizer.encode("he"), 2]
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.decode(ids, skip_special=False).endswith("he</s>")
    assert tokenizer.encode("</s>")[-1] == 2  # written out, it is the token


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
@pytest.mark.parametrize("prompt", ["", "he", "a prompt that ends in a space "])
def test_a_stream_gives_the_whole_text_and_no_half_characters(text: str, prompt: str, tokenizer: Loaded) -> None:
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    stream = tokenizer.stream(before)
    pieces = [stream.push(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces)
    everything = tokenizer.decode(before + ids)
    assert "".join(pieces) + stream.finish() == everything[len(tokenizer.decode(before)) :]
    assert stream.finish() == ""


def test_a_stream_takes_several_tokens_at_once(tokenizer: Loaded) -> None:
    ids = tokenizer.encode("he 🤗 he")
    stream = tokenizer.stream()
    assert stream.push(*ids[:5]) + stream.push() + stream.push(*ids[5:]) + stream.finish() == "he 🤗 he"


def test_a_stream_ends_in_the_middle_of_a_character(tokenizer: Loaded) -> None:
    ids = tokenizer.encode("he🤗")
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids[:-1]) == "he"
    assert stream.finish().startswith("\ufffd")


def test_bytes_that_never_become_characters_are_let_go(tokenizer: Loaded) -> None:
    half = tokenizer.encode("🤗")[-2]  # a continuation byte
    stream = tokenizer.stream()
    given = "".join(stream.push(half) for _ in range(100))
    assert set(given) == {"\ufffd"}
    assert len(given + stream.finish()) == len(tokenizer.decode([half] * 100))


def test_a_stream_of_random_tokens(tokenizer: Loaded, request: pytest.FixtureRequest) -> None:
    """Byte-level decoding is the same whole or in pieces; a run of SentencePiece's byte tokens is all or nothing."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, tokenizer.vocab_size, 40)
        stream = tokenizer.stream(ids[:10])
        given = "".join(stream.push(token) for token in ids[10:]) + stream.finish()
        if "byte-level" in request.node.name:
            assert tokenizer.decode(ids).endswith(given.lstrip("\ufffd"))  # one may straddle the prompt's end
        assert len(given) > 5


def test_a_long_run_of_characters_made_of_bytes(tokenizer: Loaded) -> None:
    text = "🤗é👧你" * 30
    for cut in range(4):
        ids = tokenizer.encode(text)
        stream = tokenizer.stream(ids[: 40 + cut])
        given = "".join(stream.push(token) for token in ids[40 + cut :]) + stream.finish()
        assert text.endswith(given) and len(given) >= 100


def test_a_character_begun_by_the_prompt_is_completed(tokenizer: Loaded) -> None:
    ids = tokenizer.encode("he🤗he")
    stream = tokenizer.stream(ids[: len(tokenizer.encode("he")) + 2])  # ends within the emoji
    rest = ids[len(tokenizer.encode("he")) + 2 :]
    assert "".join(stream.push(token) for token in rest) + stream.finish() == "🤗he"


def _template(built: Tokenizer) -> Tokenizer:
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return built


@pytest.mark.parametrize(
    ("by_processor", "by_config", "expected"),
    [(False, None, False), (True, None, True), (False, True, True), (True, False, False), (True, True, True)],
)
def test_the_beginning_token(by_processor: bool, by_config: bool | None, expected: bool, tmp_path: Path) -> None:
    built = _template(cases.tokenizer()) if by_processor else cases.tokenizer()
    config: dict[str, Any] = {"bos_token": "<s>"} | ({} if by_config is None else {"add_bos_token": by_config})
    tokenizer = load_tokenizer(folder(tmp_path, built, **config))
    assert (tokenizer.encode("he")[0] == 1) is expected
    assert tokenizer.encode("he", add_bos=False)[0] != 1
    assert tokenizer.encode("he").count(1) == expected


def test_lengths_in_the_file_do_not_cut(tmp_path: Path) -> None:
    built = cases.tokenizer()
    built.enable_truncation(3)
    built.enable_padding(length=10)
    assert len(load_tokenizer(folder(tmp_path, built)).encode("abcdefgh")) == 8


MESSAGES = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "hé"}]
TEMPLATE = cases.TEMPLATE + "{% if add_generation_prompt %}assistant:{% endif %}{{ extra }}"


def test_chat(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        folder(tmp_path, _template(cases.tokenizer()), bos_token="<s>", chat_template=TEMPLATE, add_bos_token=True)
    )
    text = "<s>user: he\nassistant: hé\nassistant:"
    assert tokenizer.render_chat(MESSAGES) == text
    ids = tokenizer.encode_chat(MESSAGES)
    assert ids.count(1) == 1 and ids[0] == 1  # the template wrote it; encoding adds no second one
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.render_chat(MESSAGES[:1], add_generation_prompt=False, extra="!") == "<s>user: he\n!"


@pytest.mark.parametrize("where", ["jinja", "json", "named", "token objects"])
def test_where_a_template_may_lie(where: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"bos_token": "<s>"}
    if where == "named":
        config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    if where == "token objects":
        config |= {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "chat_template": TEMPLATE}
    folder(tmp_path, cases.tokenizer(), **config)
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    if where == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert load_tokenizer(tmp_path).render_chat(MESSAGES).startswith("<s>user: he\n")


def test_special_tokens_map(tmp_path: Path) -> None:
    folder(tmp_path, cases.tokenizer())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert load_tokenizer(tmp_path).eos_id == 2


def test_no_template_matters_only_for_messages(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, cases.tokenizer()))
    assert tokenizer.encode("he")
    with pytest.raises(InputError, match="no chat template, expected a plain prompt"):
        tokenizer.encode_chat(MESSAGES)


@pytest.mark.parametrize("template", ["{{ raise_exception('only\ntwo') }}", "{% if %}", "{{ messages[9].content.x }}"])
def test_a_template_that_fails_is_one_line(template: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, cases.tokenizer(), chat_template=template))
    with pytest.raises(InputError, match="chat template: ") as caught:
        tokenizer.encode_chat(MESSAGES)
    assert "\n" not in str(caught.value)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "nothing"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 3}'),
    ],
)
def test_damaged_files(file: str, text: str, tmp_path: Path) -> None:
    folder(tmp_path, cases.tokenizer())
    (tmp_path / file).write_text(text)
    with pytest.raises(InputError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_loading_needs_no_torch_and_prints_nothing(tmp_path: Path) -> None:
    folder(tmp_path, cases.tokenizer(), chat_template=TEMPLATE)
    code = f"""
import sys
import aspire_jax.tokenizer
assert "transformers" not in sys.modules
t = aspire_jax.tokenizer.load_tokenizer({str(tmp_path)!r})
t.encode_chat([{{"role": "user", "content": "he"}}])
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
