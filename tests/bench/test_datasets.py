"""Each publisher's file in small, read into one form; what is none of them is refused in one line."""

from __future__ import annotations

import json

import pytest

from aspire_jax.errors import InputError
from bench import datasets

LONGBENCH = {
    "input": "Who wrote it?",
    "context": "A long text.\u2028It goes on.",  # a character that str.splitlines takes for a line's end
    "answers": ["Ada", "Ada L."],
    "length": 9,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "abc",
}
V2 = {
    "_id": "66f",
    "domain": "Single-Document QA",
    "sub_domain": "Academic",
    "difficulty": "easy",
    "length": "short",
    "question": "Which?",
    "choice_A": "one",
    "choice_B": "two",
    "choice_C": "three",
    "choice_D": "four",
    "answer": "C",
    "context": "The text.",
}
CODEELO = {
    "problem_id": "2000A",
    "url": "",
    "title": "Sum",
    "rating": 800,
    "tags": ["math"],
    "div": "Div. 3",
    "time_limit_ms": 1000,
    "memory_limit_mb": 256,
    "description": "Add $a$ and $b$.",
    "input": "Two numbers.",
    "output": "Their sum.",
    "interaction": "",
    "examples": [["1 2", "3"], ["4 5", "9"]],
    "note": None,
}


def lines(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def array(path, *rows):
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("form", [lines, array])
def test_longbench(tmp_path, form):
    trec = {**LONGBENCH, "dataset": "trec_e", "all_classes": ["Date", "Food"], "answers": ["Date"], "_id": "t"}
    one, two = datasets.read([form(tmp_path / "x", LONGBENCH, trec)])
    assert (one.dataset, one.id, one.answers, one.classes, one.chat) == ("hotpotqa", "abc", ("Ada", "Ada L."), (), True)
    assert LONGBENCH["context"] in one.prompt and one.prompt.endswith("Question: Who wrote it?\nAnswer:")
    assert one.request().messages[0]["content"] == one.prompt
    assert (two.dataset, two.classes, two.chat) == ("trec", ("Date", "Food"), False)  # LongBench-E; few-shot
    assert two.request().prompt == two.prompt and two.prompt.endswith("It goes on.\nWho wrote it?")


@pytest.mark.parametrize("form", [lines, array])
def test_longbench_v2(tmp_path, form):
    (item,) = datasets.read([form(tmp_path / "data.json", V2)])
    assert (item.dataset, item.id, item.answers) == ("longbench-v2", "66f", ("C",))
    assert "The text." in item.prompt and "(A) one\n(B) two\n(C) three\n(D) four" in item.prompt


def test_aime_as_published_by_several(tmp_path):
    file = lines(
        tmp_path / "aime2025-I.jsonl",
        {"question": "What is $1+{1}$?", "answer": "2"},
        {"problem": "And 1+2?", "answer": 3, "id": "7"},
        {"problem_idx": 3, "problem": "And 2+2?", "answer": 4, "problem_type": ["Algebra"]},
    )
    items = datasets.read([file])
    assert [i.id for i in items] == ["aime2025-I-0", "7", 3]
    assert [i.answers for i in items] == [("2",), ("3",), ("4",)] and {i.dataset for i in items} == {"aime25"}
    assert items[0].prompt.startswith("What is $1+{1}$?\n") and "\\boxed{}" in items[0].prompt


def test_codeelo_has_a_prompt_and_no_answer(tmp_path):
    (item,) = datasets.read([array(tmp_path / "test.json", CODEELO)])
    assert (item.dataset, item.id, item.answers) == ("codeelo", "2000A", ())
    for part in ("Sum", "Add $a$", "Input\nTwo numbers.", "Output\nTheir sum.", "Input:\n4 5\nOutput:\n9"):
        assert part in item.prompt
    assert "Note" not in item.prompt and "Interaction" not in item.prompt


def test_our_own(tmp_path):
    labels = {"all_classes": ["Date", "Food"], "answers": ["Food"]}
    file = lines(
        tmp_path / "own.jsonl",
        {"dataset": "qasper", "id": "q-0", "prompt": "Why?", "answers": ["so"]},
        {"dataset": "trec", "id": "t-0", "prompt": "Type:", "answers": labels},
        {"id": 3, "prompt": "Bare"},
        {"prompt": "Barer"},
    )
    a, b, c, d = datasets.read([file])
    assert (a.dataset, a.answers, a.chat) == ("qasper", ("so",), True)
    assert (b.answers, b.classes, b.chat) == (("Food",), ("Date", "Food"), False)
    assert (c.id, c.dataset, c.answers) == (3, "", ()) and d.id == "own-3"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "x.jsonl:1: fields text, expected those of LongBench"),
        (5, "x.jsonl:1: int, expected a JSON object"),
        ({"prompt": 3}, "x.jsonl:1: prompt 3, expected text"),
        ({"prompt": "a", "id": 1.5}, "x.jsonl:1: id 1.5, expected text or a whole number"),
        ({"prompt": "a", "answers": "b"}, 'x.jsonl:1: answers "b", expected a list of texts'),
        ({**LONGBENCH, "dataset": "news"}, "x.jsonl:1: dataset 'news', expected one of narrativeqa"),
        ({**LONGBENCH, "_id": None}, "x.jsonl:1: _id null, expected text or a whole number"),
        ({k: v for k, v in LONGBENCH.items() if k != "input"}, "x.jsonl:1: no input, expected text"),
        ({**LONGBENCH, "answers": [1]}, r"x.jsonl:1: answers \[1\], expected a list of texts"),
        ({**V2, "answer": "E"}, "x.jsonl:1: answer 'E', expected one of A, B, C, D"),
        ({k: v for k, v in V2.items() if k != "choice_D"}, "x.jsonl:1: no choice_D, expected text"),
        ({"question": "a", "answer": True}, "x.jsonl:1: answer true, expected a whole number or text"),
        ({**CODEELO, "examples": [["1"]]}, "x.jsonl:1: examples, expected a list of pairs"),
    ],
)
def test_refused(tmp_path, row, message):
    with pytest.raises(InputError, match=message) as caught:
        datasets.read([lines(tmp_path / "x.jsonl", row)])
    assert "\n" not in str(caught.value)


def test_files_refused(tmp_path):
    with pytest.raises(InputError, match=r"none.jsonl: .*, expected a readable UTF-8 file"):
        datasets.read([str(tmp_path / "none.jsonl")])
    for name, text, message in (
        ("empty.jsonl", "\n", "empty.jsonl: empty, expected at least one task"),
        ("cut.json", '[{"prompt": "a"}', "cut.json: .*, expected a JSON array of objects"),
        ("cut.jsonl", '{"prompt": "a"}\n{"prompt"', "cut.jsonl:2: .*, expected a JSON object"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=message):
            datasets.read([str(tmp_path / name)])
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(InputError, match="expected a readable UTF-8 file"):
        datasets.read([str(tmp_path / "latin.jsonl")])
    one = lines(tmp_path / "one.jsonl", {"id": "a", "prompt": "x"})
    two = lines(tmp_path / "two.jsonl", {"id": "b", "prompt": "x"}, {"id": "a", "prompt": "y"})
    with pytest.raises(
        InputError, match=r"two.jsonl:2: id 'a', expected an id of its own \(.*one.jsonl:1 has it too\)"
    ):
        datasets.read([one, two])
