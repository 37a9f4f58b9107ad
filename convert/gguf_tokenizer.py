"""GGUF's tokenizer metadata to a tokenizer.json, with the `tokenizers` library.

Two kinds are in use by the families this package runs: byte-level BPE ("gpt2"), whose text splitting GGUF names
but does not describe, and SentencePiece BPE ("llama"), given by scores instead of merges.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from aspire_jax.errors import InputError
from convert.fields import Fields
from convert.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types; 1 normal, 5 unused and 6 byte need nothing

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _Splitting:
    """How text is cut before byte-level BPE; `pattern` None is GPT-2's own."""

    pattern: str | None = None
    digits: bool = False  # every digit by itself first
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges
    add_bos: bool = False  # where the metadata does not say


_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(digits=True),
    "llama-bpe": _Splitting(_LLAMA3, ignore_merges=True, add_bos=True),
    "qwen2": _Splitting(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Splitting(_QWEN2, nfc=True),
    "tekken": _Splitting(_TEKKEN, ignore_merges=True, add_bos=True),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "gpt2": "gpt-2"}


def build_tokenizer(gguf: GgufFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a GGUF file and the contents of its tokenizer_config.json.

    Raises:
      InputError: no tokenizer in the file, one of an unknown kind, or one that contradicts itself.
    """
    f = Fields(gguf.path, gguf.metadata)
    tokens = f.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise InputError(f"{gguf.path}: tokenizer.ggml.tokens is missing or not a list of strings")
    ready = f.get("tokenizer.huggingface.json")
    kind = f.text("tokenizer.ggml.model")
    try:
        if ready is not None:
            tokenizer = Tokenizer.from_str(ready)
            add_bos = None  # its own post-processor says
        elif kind == "gpt2":
            tokenizer, add_bos = _byte_level(f, tokens)
        elif kind == "llama":
            tokenizer, add_bos = _sentencepiece(f, tokens)
        else:
            raise f.fail("tokenizer.ggml.model", "gpt2 or llama")
    except InputError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise InputError(f"{gguf.path}: tokenizer: {error}") from error
    return tokenizer, _config(f, tokens, tokenizer, add_bos)


def _vocabulary(f: Fields, tokens: list[str]) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise InputError(f"{f.file}: tokenizer.ggml.tokens has {twice!r} twice")
    return vocab


def _byte_level(f: Fields, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = f.text("tokenizer.ggml.pre")  # no default: a wrong guess would split some texts wrongly, unnoticed
    splitting = _SPLITTINGS.get(_ALIASES.get(name, name))
    if splitting is None:
        raise f.fail("tokenizer.ggml.pre", f"one of {', '.join(_SPLITTINGS)}")
    lines = f.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise InputError(f"{f.file}: tokenizer.ggml.merges is missing, expected a list of strings")
    merges = []
    for line in lines:
        left, _, right = str(line).partition(" ")
        if not left or not right or " " in right:
            raise InputError(f"{f.file}: tokenizer.ggml.merges has {line!r}, expected two tokens")
        merges.append((left, right))
    model = models.BPE(
        vocab=_vocabulary(f, tokens), merges=merges, fuse_unk=False, byte_fallback=False,
        ignore_merges=splitting.ignore_merges,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    prefix = f.flag("tokenizer.ggml.add_space_prefix", False)
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(f, tokenizer, tokens)
    return tokenizer, f.flag("tokenizer.ggml.add_bos_token", splitting.add_bos)


def _sentencepiece(f: Fields, tokens: list[str]) -> tuple[Tokenizer, bool]:
    scores = f.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise InputError(f"{f.file}: tokenizer.ggml.scores is missing or not a number per token ({len(tokens)})")
    vocab = _vocabulary(f, tokens)
    types = _types(f, tokens)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    mergeable = {token: index for token, index in vocab.items() if types[index] in (1, _USER_DEFINED, 5)}
    model = models.BPE(
        vocab=vocab, merges=_merges_of_scores(mergeable, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    strip = f.flag("tokenizer.ggml.add_space_prefix", True)
    if strip:
        steps.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        undo.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(undo)
    _add_tokens(f, tokenizer, tokens)
    return tokenizer, f.flag("tokenizer.ggml.add_bos_token", True)


def _merges_of_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: every split of every token, best token first."""
    merges = []
    for token, index in vocab.items():
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        local = [(left, right) for left, right in splits if left in vocab and right in vocab]
        local.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(-scores[index], pair) for pair in local]
    merges.sort(key=lambda item: item[0])  # stable: the order within a token stays
    return [pair for _, pair in merges]


def _types(f: Fields, tokens: list[str]) -> list[int]:
    types = f.get("tokenizer.ggml.token_type")
    if types is None:
        return [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise InputError(f"{f.file}: tokenizer.ggml.token_type is not a number per token ({len(tokens)})")
    return types


def _add_tokens(f: Fields, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Marks the tokens that are matched whole in the text: control tokens (special) and user-defined ones."""
    for token, kind in zip(tokens, _types(f, tokens), strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _config(f: Fields, tokens: list[str], tokenizer: Tokenizer, add_bos: bool | None) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        ids = f.ids(f"tokenizer.ggml.{key}_token_id")
        if ids and ids[0] >= len(tokens):
            raise f.fail(f"tokenizer.ggml.{key}_token_id", f"less than the number of tokens ({len(tokens)})")
        if ids:
            config[f"{name}_token"] = tokens[ids[0]]
    if add_bos and "bos_token" not in config:
        raise f.fail("tokenizer.ggml.bos_token_id", "a token id, since add_bos_token is set")
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    if add_bos:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    template = f.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = f.text("tokenizer.chat_template")
    return config
