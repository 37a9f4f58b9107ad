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
        turn = 7 * (number // len(_REFERENCE))  # other text when the list begins anew
        text = _cut(tokenizer, "\n\n".join([*chosen, *others[turn:], *others[:turn]]), context - _LEFT_FREE)
        round_ = f" ({number // len(_REFERENCE) + 1})" if number >= len(_REFERENCE) else ""
        yield Request(id=label + round_, messages=[{"role": "user", "content": f"{text}\n\n{instruction}"}])


def _continue(tokenizer: Tokenizer, context: int) -> Iterator[Request]:
    library = Path(os.__file__).parent
    files = [library / name for name in _SOURCES if (library / name).is_file()]
    if not files:
        files = sorted(library.glob("*.py"))
    for number in range(1_000_000):
        # Several files in a row where one is shorter than the context.
        order = files[number % len(files) :] + files[: number % len(files)]
        text = _cut(tokenizer, "\n".join(f.read_text(encoding="utf-8") for f in order[:4]), context)
        round_ = f" ({number // len(files) + 1})" if number >= len(files) else ""
        yield Request(id=f"continue: {order[0].name}{round_}", prompt=text.rsplit("\n", 1)[0] + "\n")


def _cut(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """The beginning of `text`, about `tokens` tokens of it, whole words."""
    ids = tokenizer.encode(text[: 12 * tokens], add_bos=False)
    return tokenizer.decode(ids[:tokens]).rsplit(" ", 1)[0] if len(ids) > tokens else text[: 12 * tokens]
