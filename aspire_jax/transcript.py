"""A request's answer as it grows, token by token: a stop string ends it at the same place whatever the method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aspire_jax.tokenizer import Tokenizer


class Transcript:
    """Tokens in, text out, cut before the first stop string.

    Attributes:
      token_ids: the answer's tokens so far.
      stopped: whether a stop string was found; tokens after it are dropped.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        """`min_tokens`: a stop string that one of the first so many tokens completes does not count."""
        self._min_tokens = min_tokens
        self.token_ids: list[int] = []
        self.stopped = False
        self._decoder = None if tokenizer is None else tokenizer.stream(prompt)
        self._stop = tuple(stop)
        self._text = ""
        self._shown = 0

    @property
    def text(self) -> str:
        """The text so far, without characters that are not whole yet."""
        return self._text

    def push(self, tokens: Iterable[int], *, end_token: bool = False) -> None:
        """Adds tokens up to the one that completes a stop string. `end_token`: the last is a stop token, no text."""
        tokens = [int(t) for t in tokens]
        for place, token in enumerate(tokens):
            if self.stopped:
                return
            self.token_ids.append(token)
            if self._decoder is not None and not (end_token and place == len(tokens) - 1):
                self._add(self._decoder.push(token))

    def finish(self) -> None:
        """Ends the text: an incomplete last character is replaced."""
        if self._decoder is not None and not self.stopped:
            self._add(self._decoder.finish())

    def take(self, *, final: bool) -> str:
        """Text not taken yet that no later token can cut off; all of it where `final`."""
        end = len(self._text) if final else len(self._text) - self._pending()
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _add(self, piece: str) -> None:
        before = len(self._text)
        self._text += piece
        if len(self.token_ids) <= self._min_tokens:
            return
        found = [at for s in self._stop if (at := self._text.find(s, max(0, before - len(s) + 1))) >= 0]
        if found:
            self.stopped = True
            self._text = self._text[: min(found)]

    def _pending(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max((n for s in self._stop for n in range(1, len(s)) if self._text.endswith(s[:n])), default=0)
