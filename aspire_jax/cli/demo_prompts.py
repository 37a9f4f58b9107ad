"""Long prompts from text that every Python installation carries, so that the demo needs no data.

The language reference (`pydoc_data.topics`) is summarised and asked about, standard library sources are continued.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from aspire_jax.request import Request

if TYPE_CHECKING:
    from aspire_jax.tokenizer import Tokenizer

# Topics that fill each prompt, first to last, and the question about them. The text goes on with other topics where
# these are too short for the context asked for.
_REFERENCE = (
    ("summarise: data model", ("types", "specialnames"), "Summarise the text above in a few sentences."),
    (
        "question: exceptions",
        ("try", "exceptions", "raise", "with"),
        "What does the finally clause do? Quote the text.",
    ),
    ("summarise: functions", ("function", "calls", "lambda"), "Summarise the text above in a few sentences."),
    (
        "question: formatting",
        ("formatstrings", "string-methods"),
        "How is a number aligned to the right? Quote the text.",
    ),
    ("summarise: classes", ("class", "attribute-access", "customization"), "List the main points of the text above."),
)
_SOURCES = ("argparse.py", "tarfile.py", "datetime.py", "typing.py", "ast.py", "inspect.py", "subprocess.py")
_LEFT_FREE = 96  # tokens for the instruction and the chat template


def requests(tokenizer: Tokenizer, context: int, count: int) -> list[Request]:
    """`count` requests of about `context` tokens each, named by what they ask."""
    out: list[Request] = []
    kinds = [_reference(tokenizer, context), _continue(tokenizer, context)]
    while len(out) < count:  # two of the reference, then one of the sources
        out.append(next(kinds[len(out) % 3 == 2]))
    return out


def _reference(tokenizer: Tokenizer, context: int) -> Iterator[Request]:
    from pydoc_data.topics import topics

    for number in range(1_000_000):
        label, names, instruction = _REFERENCE[number % len(_REFERENCE)]
        chosen = [topics[name] for name in names if name in topics]
        others = [text for _, text in sorted(topics.items()) if text not in chosen]
        turn = number // len(_REFERENCE)
        text = _cut(tokenizer, "\n\n".join([*chosen, *others]), context - _LEFT_FREE, turn)
        yield Request(id=_name(label, turn), messages=[{"role": "user", "content": f"{text}\n\n{instruction}"}])


def _continue(tokenizer: Tokenizer, context: int) -> Iterator[Request]:
    library = Path(os.__file__).parent
    files = [library / name for name in _SOURCES if (library / name).is_file()]
    if not files:
        files = sorted(library.glob("*.py"))
    for number in range(1_000_000):
        # Several files in a row where one is shorter than the context.
        order = files[number % len(files) :] + files[: number % len(files)]
        turn = number // len(files)
        text = _cut(tokenizer, "\n".join(f.read_text(encoding="utf-8") for f in order[:4]), context, turn)
        yield Request(id=_name(f"continue: {order[0].name}", turn), prompt=text.rsplit("\n", 1)[0] + "\n")


def _name(label: str, turn: int) -> str:
    return f"{label} ({turn + 1})" if turn else label


def _cut(tokenizer: Tokenizer, text: str, tokens: int, turn: int) -> str:
    """About `tokens` tokens of `text`, whole words, from its beginning; in later turns from further behind."""
    characters = 12 * tokens  # more than these tokens have
    begin = turn * 4 * tokens % max(1, len(text) - characters)
    text = text[begin : begin + characters]
    ids = tokenizer.encode(text, add_bos=False)
    return tokenizer.decode(ids[:tokens]).rsplit(" ", 1)[0] if len(ids) > tokens else text
