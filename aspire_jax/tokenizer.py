"""Text to token ids and back, over the fast tokenizer in a converted folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aspire_jax.errors import InputError

Messages = Sequence[Mapping[str, Any]]

_REPLACEMENT = "\ufffd"  # what bytes that are no UTF-8 decode to
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in folder `path`: tokenizer.json, and beside it its config and chat template where present.

    Raises:
      InputError: no tokenizer there, or a damaged one; names the file.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{folder}: no tokenizer.json, expected a folder converted with its tokenizer")
    # Nothing here needs torch; this stops transformers from saying that it is not there.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import tokenizers
    import transformers

    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise InputError(f"{file}: {error}, expected a tokenizer of the tokenizers library") from error
    backend.no_padding()
    backend.no_truncation()  # a file may carry the lengths it was trained with
    config = _read(folder / "tokenizer_config.json")
    special = {**_read(folder / "special_tokens_map.json"), **config}
    # The generic class takes tokenizer.json as it is; the models' own classes rebuild parts of it.
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_chat_template(folder, config),
        **{key: content for key in _SPECIAL if (content := _content(special.get(key))) is not None},
    )
    return Tokenizer(folder, fast, config.get("add_bos_token"))


class Tokenizer:
    """A thin wrapper over a fast tokenizer.

    Attributes:
      bos_id, eos_id, pad_id: special token ids, or None.
      special_ids: ids of every special token; `decode` leaves them out unless told otherwise.
      vocab_size: number of tokens, special ones included.
    """

    def __init__(self, path: Path, fast: Any, add_bos: bool | None) -> None:
        self._path, self._fast = path, fast
        self._backend = fast.backend_tokenizer
        self.bos_id: int | None = fast.bos_token_id
        self.eos_id: int | None = fast.eos_token_id
        self.pad_id: int | None = fast.pad_token_id
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        # An explicit add_bos_token wins; otherwise the tokenizer's own post-processor says.
        template = self._backend.encode("").ids if add_bos is None else []
        wants = self.bos_id in template if add_bos is None else add_bos
        self._prefix = [self.bos_id] if wants and self.bos_id is not None else []

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
          text: special tokens written out in it are recognised.
          add_bos: begin with the beginning-of-text token where this tokenizer does so by habit.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return self._prefix + ids if add_bos else ids

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True, **template: Any) -> str:
        """The text that the model's chat template makes of `messages` ({"role", "content"} each).

        Args:
          add_generation_prompt: end with the beginning of the assistant's answer.
          **template: further variables of the template ("enable_thinking").

        Raises:
          InputError: no chat template, or one that refuses these messages.
        """
        if self._fast.chat_template is None:
            raise InputError(f"{self._path}: no chat template, expected a plain prompt in place of messages")
        try:
            return str(
                self._fast.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **template,
                )
            )
        except ImportError:
            raise
        except Exception as error:  # a template may raise anything
            raise InputError(f"{self._path}: chat template: {error or type(error).__name__}") from error

    def encode_chat(self, messages: Messages, *, add_generation_prompt: bool = True, **template: Any) -> list[int]:
        """Token ids of `messages`; the template itself writes the beginning token. Arguments as `render_chat`."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **template)
        return self.encode(text, add_bos=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become the replacement character."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of `token_id` (in the tokenizer's own alphabet), or None."""
        entry: str | None = self._backend.id_to_token(token_id)
        return entry

    def token_id(self, token: str) -> int | None:
        """The id of vocabulary entry `token`, or None."""
        entry: int | None = self._backend.token_to_id(token)
        return entry

    def stream(self, prompt: Sequence[int] = (), *, skip_special: bool = True) -> Detokenizer:
        """An incremental decoder for the tokens that follow `prompt`."""
        return Detokenizer(self, prompt, skip_special=skip_special)


class Detokenizer:
    """Decodes a stream of tokens piece by piece.

    The pieces concatenate to what decoding all tokens at once gives (after the prompt), and no piece ends within
    a UTF-8 character: bytes are held back until the character is whole. A token's text depends on its neighbours
    (some tokenizers drop the space of the first word), so each piece is the difference of two decodings that
    begin a few tokens earlier, at the beginning of an earlier piece: a decoding that begins within a character
    can spoil everything after it.
    """

    _CONTEXT = 8  # tokens before a piece that may matter to it
    _HELD = 16  # a character has at most four bytes; beyond this the bytes are not UTF-8 and are let go

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        context, held = self._split([int(i) for i in prompt[-2 * self._CONTEXT :]])
        self._pieces = [context]  # tokens already shown, piece by piece
        self._held = held  # not shown yet

    def push(self, *ids: int) -> str:
        """Adds tokens; returns the text that is now certain, possibly empty."""
        self._held += [int(i) for i in ids]
        return self._take(final=False)

    def finish(self) -> str:
        """The text still held back, incomplete characters replaced."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        context = [i for piece in self._pieces for i in piece]
        before, after = self._decode(context), self._decode(context + self._held)
        incomplete = after.endswith(_REPLACEMENT) and len(self._held) < self._HELD
        if not self._held or (incomplete and not final) or len(after) <= len(before):
            return ""
        self._pieces.append(self._held)
        self._held = []
        while sum(map(len, self._pieces[1:])) >= self._CONTEXT:
            del self._pieces[0]
        return after[len(before) :]

    def _split(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """The prompt's last whole characters, and the tokens of one that it only begins (the first piece has it)."""
        for missing in range(4):
            end = max(0, len(prompt) - missing)
            for size in range(min(self._CONTEXT, end), end + 1):
                if _REPLACEMENT not in self._decode(prompt[end - size : end]):
                    return prompt[end - size : end], prompt[end:]
        return prompt, []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: {error}, expected a JSON object") from error
    if not isinstance(value, dict):
        raise InputError(f"{file}: a JSON {type(value).__name__}, expected an object")
    return value


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template: in a file of its own, or in the config, there perhaps one of several by name."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = _read(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise InputError(f"{folder}: chat_template is a JSON {type(template).__name__}, expected a string")
    return template


def _content(token: Any) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
