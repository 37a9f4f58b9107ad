"""The metrics, on values worked out by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("rapidfuzz")

from bench import scoring
from bench.datasets import Item


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("The cat sat.", "cat sat", 1.0),  # article, case and full stop go
        ("a black cat", "the white cat sat", 2 * 1 / (2 + 3)),  # one word of two and of three
        ("cat cat", "cat", 2 * 1 / (2 + 1)),  # a word counts as often as both have it
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
    ],
)
def test_f1(text, truth, value):
    assert scoring.f1(text, truth) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        # Lin 2004: police killed the gunman / police kill the gunman: the subsequence is police the gunman.
        ("police kill the gunman", "police killed the gunman", 2 * 3 / (4 + 4)),
        ("the gunman kill police", "police killed the gunman", 2 * 2 / (4 + 4)),  # order matters: the gunman
        ("The Gunman!", "the gunman", 1.0),
        ("", "the gunman", 0.0),
    ],
)
def test_rouge_l(text, truth, value):
    assert scoring.rouge_l(text, truth) == pytest.approx(value)


def test_label():
    classes = ["Date", "Other date", "Food", "Number"]
    assert scoring.label("It is Food", "Food", classes) == 1
    assert scoring.label("Food or Date", "Food", classes) == 0.5
    assert scoring.label("Number", "Food", classes) == 0
    # "date" in lower case is no label, and a label inside the right one does not count against it.
    assert (
        scoring.label("Expression abbreviated", "Expression abbreviated", ["Expression", "Expression abbreviated"]) == 1
    )


def test_number():
    assert scoring.number("Paragraph 7", "Paragraph 7") == 1
    assert scoring.number("7, perhaps 8", "7") == 0.5
    assert scoring.number("none", "7") == 0
    assert scoring.number("段落17", "段落17") == 1


def test_edit():
    assert scoring.edit("\n# a comment\nreturn a\nreturn b", "return a") == 1
    assert scoring.edit("abcd", "abxd") == pytest.approx(1 - 2 / 8)  # one letter out, one in, of eight
    assert scoring.edit("```python", "x = 1") == 0


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        (r"so \boxed{70}.", "70", 1),
        (r"\boxed{69}, no: \boxed{ 070 }", "70", 1),  # the last one, as a number
        (r"\boxed{70} or \boxed{7", "70", 1),  # one that is cut off does not count
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{70}", "7", 0),
        ("70", "70", 0),
    ],
)
def test_boxed(text, truth, value):
    assert scoring.boxed(text, truth) == value


def test_choice():
    assert scoring.choice("The correct answer is (C).", "C") == 1
    assert scoring.choice("**The correct answer is C**", "C") == 1
    assert scoring.choice("(A) is wrong. The answer is (B)", "A") == 0
    assert scoring.choice("B) two", "B") == 1
    assert scoring.choice("All of them", "A") == 0


def test_a_task_has_its_metric_and_the_best_of_its_answers():
    item = Item(dataset="hotpotqa", id=0, prompt="", answers=("Ada", "Grace"))
    assert scoring.score(item, "grace") == 1
    trec = Item(dataset="trec", id=0, prompt="", answers=("Food",), classes=("Food", "Date"))
    assert scoring.score(trec, "\nFood\nQuestion: When?\nType: Date") == 1  # the first line alone
    zh = Item(dataset="multifieldqa_zh", id=0, prompt="", answers=("北京市",))
    assert scoring.score(zh, "北京。") == pytest.approx(2 * 2 / (2 + 3))
    code = Item(dataset="codeelo", id=0, prompt="")
    assert scoring.score(code, "print(1)") is None
    assert scoring.score(Item(dataset="hotpotqa", id=0, prompt=""), "x") is None
