"""Benchmark files as their publishers ship them, read into one form.

    LongBench      one JSON object a line: input, context, answers, all_classes, dataset, _id, ...   (arXiv 2308.14508)
    LongBench v2   one JSON array: question, choice_A to choice_D, answer, context, domain, _id, ... (arXiv 2412.15204)
    AIME 2025      one JSON object a line: question (or problem), answer
    CodeElo        one JSON array: problem_id, title, description, input, output, examples, ...     (arXiv 2501.01257)
    our own        one JSON object a line: prompt, and where known dataset, id, answers

Each may be lines or an array, and a file may mix them: an object's fields say what it is. The words around a task's
text are ours, so scores are not to be set beside published ones to the last point.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aspire_jax.errors import InputError
from aspire_jax.request import Request

# Tasks whose prompt is a text to go on with: examples whose next answer is missing, or code (as in LongBench's runs).
CONTINUED = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
CHOICES = "ABCD"

_ABOUT = "Read this text, then do what is asked below it.\n\n{context}\n\n"
_SHORT = _ABOUT + "Answer in as few words as possible, with the answer alone.\nQuestion: {input}\nAnswer:"
_SUMMARY = _ABOUT + "Summarise the text in about one page."
_EXAMPLES = "Go on as in these examples.\n\n{context}\n{input}"
_ZH = "请阅读以下内容。\n\n{context}\n\n请根据以上内容简短回答：{input}\n回答："  # noqa: RUF001
_PROMPTS = {
    "narrativeqa": _SHORT,
    "qasper": _SHORT,
    "multifieldqa_en": _SHORT,
    "multifieldqa_zh": _ZH,
    "hotpotqa": _SHORT,
    "2wikimqa": _SHORT,
    "musique": _SHORT,
    "dureader": _ZH,
    "gov_report": _SUMMARY,
    "qmsum": _ABOUT + "Answer in one or a few sentences.\nQuestion: {input}\nAnswer:",
    "multi_news": _SUMMARY,
    "vcsum": "请阅读以下会议记录。\n\n{context}\n\n请写一段总结：",  # noqa: RUF001
    "trec": _EXAMPLES,
    "triviaqa": _EXAMPLES,
    "samsum": _EXAMPLES,
    "lsht": "{context}\n{input}",
    "passage_count": _ABOUT + "How many different paragraphs are there? Answer with the number alone:",
    "passage_retrieval_en": _ABOUT + "Summary: {input}\n\nWhich paragraph does it summarise? Answer like Paragraph 1:",
    "passage_retrieval_zh": "{context}\n\n摘要：{input}\n\n摘要出自哪一段？按“段落1”的格式回答：",  # noqa: RUF001
    "lcc": "{context}",
    "repobench-p": "{context}{input}",
}
_MATHS = "{question}\n\nThink step by step and put the final answer in \\boxed{{}}."
_CHOICE = _ABOUT + "Question: {question}\n{choices}\n\nAnswer with: The correct answer is (letter)."
_PROGRAM = (
    "Solve this programming problem. Write the whole program: it reads standard input and writes standard output.\n\n"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One task.

    Attributes:
      dataset: its name in lower case, which decides the metric (`scoring.METRICS`); "" where not known.
      id: unique in its file.
      prompt: what the model is given.
      answers: right answers, any of which counts; empty where none is known.
      classes: all labels of a classification task.
      chat: whether the prompt is a user's message; else it is a text to go on with.
    """

    dataset: str
    id: str | int
    prompt: str
    answers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    chat: bool = True

    def request(self) -> Request:
        """The task as a request."""
        if self.chat:
            return Request(id=self.id, messages=[{"role": "user", "content": self.prompt}])
        return Request(id=self.id, prompt=self.prompt)


def read(files: Sequence[str]) -> list[Item]:
    """The tasks of `files`, in order.

    Raises:
      InputError: a file that cannot be read, or a task that is none of the known kinds; names file, place and field.
    """
    out: list[Item] = []
    seen: dict[str | int, str] = {}
    for file in files:
        for where, row, number in _rows(file):
            item = _item(row, where, f"{Path(file).stem}-{number}")
            if item.id in seen:
                raise InputError(f"{where}: id {item.id!r}, expected an id of its own ({seen[item.id]} has it too)")
            seen[item.id] = where
            out.append(item)
    return out


def _rows(file: str) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Where it stands, the object, and its number from 0."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: {error}, expected a readable UTF-8 file") from error
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise InputError(f"{file}: {error}, expected a JSON array of objects") from error
        places = [(f"{file}, item {i + 1}", row) for i, row in enumerate(rows)]
    else:
        places = []
        # By line feeds alone: texts may hold other characters that Python counts as line ends.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    places.append((f"{file}:{number}", json.loads(line)))
                except ValueError as error:
                    raise InputError(f"{file}:{number}: {error}, expected a JSON object") from error
    if not places:
        raise InputError(f"{file}: empty, expected at least one task")
    for number, (where, row) in enumerate(places):
        if not isinstance(row, dict):
            raise InputError(f"{where}: {type(row).__name__}, expected a JSON object")
        yield where, row, number


def _item(row: dict[str, Any], where: str, name: str) -> Item:
    """The task in one object, whichever publisher's it is."""
    if "prompt" in row:
        return _ours(row, where, name)
    if "choice_A" in row:
        return _longbench_v2(row, where)
    if {"context", "answers"} <= row.keys():
        return _longbench(row, where)
    if "description" in row:
        return _codeelo(row, where)
    if {"question", "answer"} <= row.keys() or {"problem", "answer"} <= row.keys():
        return _aime(row, where, name)
    fields = ", ".join(sorted(row)) or "none"
    raise InputError(
        f"{where}: fields {fields}, expected those of LongBench (input, context, answers), LongBench v2 (question, "
        "choice_A), AIME (question, answer), CodeElo (problem_id, description), or prompt"
    )


def _ours(row: dict[str, Any], where: str, name: str) -> Item:
    dataset = _text(row, "dataset", where, "").lower()
    given: Any = row.get("answers", [])
    nested: dict[str, Any] = given if isinstance(given, dict) else {"answers": given}
    answers, classes = nested.get("answers"), nested.get("all_classes", row.get("all_classes"))
    return Item(
        dataset=dataset,
        id=_id(row, "id", where, name),
        prompt=_text(row, "prompt", where),
        answers=_texts(answers, "answers", where),
        classes=_texts(classes or [], "all_classes", where),
        chat=dataset not in CONTINUED,
    )


def _longbench(row: dict[str, Any], where: str) -> Item:
    dataset = _text(row, "dataset", where).lower().removesuffix("_e")  # LongBench-E has the same tasks
    if dataset not in _PROMPTS:
        raise InputError(f"{where}: dataset {dataset!r}, expected one of {', '.join(_PROMPTS)}")
    words = {"context": _text(row, "context", where), "input": _text(row, "input", where)}
    return Item(
        dataset=dataset,
        id=_id(row, "_id", where),
        prompt=_PROMPTS[dataset].format(**words),
        answers=_texts(row["answers"], "answers", where),
        classes=_texts(row.get("all_classes") or [], "all_classes", where),
        chat=dataset not in CONTINUED,
    )


def _longbench_v2(row: dict[str, Any], where: str) -> Item:
    choices = "\n".join(f"({letter}) {_text(row, f'choice_{letter}', where)}" for letter in CHOICES)
    answer = _text(row, "answer", where)
    if answer not in CHOICES or len(answer) != 1:
        raise InputError(f"{where}: answer {answer!r}, expected one of A, B, C, D")
    question = {"context": _text(row, "context", where), "question": _text(row, "question", where), "choices": choices}
    return Item(dataset="longbench-v2", id=_id(row, "_id", where), prompt=_CHOICE.format(**question), answers=(answer,))


def _aime(row: dict[str, Any], where: str, name: str) -> Item:
    question = _text(row, "question" if "question" in row else "problem", where)
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        raise InputError(f"{where}: answer {json.dumps(answer)}, expected a whole number or text")
    key = "problem_idx" if "problem_idx" in row else "id"
    return Item(
        dataset="aime25",
        id=_id(row, key, where, name),
        prompt=_MATHS.format(question=question),
        answers=(str(answer).strip(),),
    )


def _codeelo(row: dict[str, Any], where: str) -> Item:
    """Without an answer: CodeElo's are judged by running them against hidden tests."""
    parts = [f"{_text(row, 'title', where, '')}\n\n{_text(row, 'description', where)}".strip()]
    for field in ("input", "output", "interaction"):
        if text := _text(row, field, where, ""):
            parts.append(f"{field.capitalize()}\n{text}")
    examples = row.get("examples") or []
    if not all(isinstance(e, list) and len(e) == 2 and all(isinstance(x, str) for x in e) for e in examples):
        raise InputError(f"{where}: examples, expected a list of pairs of input and output")
    parts += [f"Example\nInput:\n{given}\nOutput:\n{wanted}" for given, wanted in examples]
    if text := _text(row, "note", where, ""):
        parts.append(f"Note\n{text}")
    return Item(dataset="codeelo", id=_id(row, "problem_id", where), prompt=_PROGRAM + "\n\n".join(parts))


def _text(row: dict[str, Any], field: str, where: str, default: str | None = None) -> str:
    value = row.get(field, default)
    if value is None and default is not None:  # null where a publisher leaves a field empty
        return default
    if not isinstance(value, str):
        found = f"{field} {json.dumps(value)[:60]}" if field in row else f"no {field}"
        raise InputError(f"{where}: {found}, expected text")
    return value


def _texts(values: Any, field: str, where: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise InputError(f"{where}: {field} {json.dumps(values)[:60]}, expected a list of texts")
    return tuple(values)


def _id(row: dict[str, Any], field: str, where: str, default: str | None = None) -> str | int:
    value = row.get(field, default)
    if isinstance(value, bool) or not isinstance(value, str | int):
        found = f"{field} {json.dumps(value)[:60]}" if field in row else f"no {field}"
        raise InputError(f"{where}: {found}, expected text or a whole number")
    return value
