r"""How right an answer is, by its task's usual metric: each from 0 to 1, the best over the right answers.

    f1        words in common, of the answer and the truth, after SQuAD's normalisation
    rouge_l   F1 of the longest common subsequence of words
    label     the task's label is named; less where others are too
    number    the share of the numbers named that are right (counting, finding a paragraph)
    edit      edit similarity of the first line of code
    boxed     the last \boxed{} is right
    choice    the letter chosen is right

Which task has which is LongBench's table (arXiv 2308.14508) and the papers of the others. Chinese text is compared by
characters, where LongBench cuts it into words first. CodeElo's answers have to be run and are not scored.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable, Sequence

from bench.datasets import Item

METRICS = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"), "f1"),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa"), "f1"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum", "dureader", "vcsum"), "rouge_l"),
    **dict.fromkeys(("trec", "lsht"), "label"),
    **dict.fromkeys(("passage_count", "passage_retrieval_en", "passage_retrieval_zh"), "number"),
    **dict.fromkeys(("lcc", "repobench-p"), "edit"),
    "aime25": "boxed",
    "longbench-v2": "choice",
}
# Tasks whose answer is the first line: what follows is the model going on with examples of its own.
_FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})
_CHINESE = frozenset({"multifieldqa_zh", "dureader", "vcsum"})


def score(item: Item, text: str) -> float | None:
    """Score of the answer `text`, 0 to 1; None where the task has no metric here or no known answer."""
    metric = METRICS.get(item.dataset)
    if metric is None or not item.answers:
        return None
    if item.dataset in _FIRST_LINE:
        text = text.lstrip("\n").split("\n")[0]
    if item.dataset in _CHINESE:
        text, answers = _spaced(text), [_spaced(a) for a in item.answers]
    else:
        answers = list(item.answers)
    if metric == "label":
        return max(label(text, truth, item.classes) for truth in answers)
    return max(_TWO_TEXTS[metric](text, truth) for truth in answers)


def f1(text: str, truth: str) -> float:
    """F1 of the words in common (SQuAD): lower case, without punctuation and articles."""
    words, right = _normal(text).split(), _normal(truth).split()
    common = sum((collections.Counter(words) & collections.Counter(right)).values())
    return _f1(common, len(words), len(right))


def rouge_l(text: str, truth: str) -> float:
    """F1 of the longest common subsequence of words (ROUGE-L, Lin 2004): letters and digits, in lower case."""
    from rapidfuzz.distance import LCSseq

    words, right = (re.findall(r"[^\W_]+", t.lower()) for t in (text, truth))
    return _f1(int(LCSseq.similarity(words, right)), len(words), len(right))


def label(text: str, truth: str, classes: Sequence[str]) -> float:
    """1 / the labels named, where the right one is among them; labels that are part of the right one do not count."""
    named = {c for c in classes if c in text and (c == truth or c not in truth)}
    return 1 / len(named) if truth in named else 0.0


def number(text: str, truth: str) -> float:
    """Share of the numbers in the text that are the truth's first one."""
    found, right = re.findall(r"\d+", text), re.findall(r"\d+", truth)
    return sum(n == right[0] for n in found) / len(found) if found and right else 0.0


def edit(text: str, truth: str) -> float:
    """Similarity of the first line of code in the text to the truth: 1 - insertions and deletions / both lengths."""
    from rapidfuzz.distance import Indel

    lines = (line for line in text.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    return float(Indel.normalized_similarity(next(lines, ""), truth))


def boxed(text: str, truth: str) -> float:
    r"""Whether the last \boxed{} holds the truth, compared as whole numbers where both are."""
    answer = last_boxed(text)
    if answer is None:
        return 0.0
    answer, truth = (re.sub(r"\s|\\[,;! ]|\$", "", t) for t in (answer, truth))
    if re.fullmatch(r"[+-]?\d+", answer) and re.fullmatch(r"[+-]?\d+", truth):
        return float(int(answer) == int(truth))
    return float(answer == truth)


def last_boxed(text: str) -> str | None:
    r"""What the last complete \boxed{} holds; braces inside may nest."""
    starts = [m.end() for m in re.finditer(r"\\boxed\s*\{", text)]
    for start in reversed(starts):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[start:place]
    return None


def choice(text: str, truth: str) -> float:
    """Whether the letter is right: the one that "answer is" last leads to, else a letter that stands first."""
    text = text.replace("*", "")
    said = re.findall(r"answer\s+is:?\s*\(?([A-D])\b", text) or re.findall(r"^\s*\(?([A-D])\b", text)
    return float(bool(said) and said[-1] == truth)


_TWO_TEXTS: dict[str, Callable[[str, str], float]] = {
    "f1": f1,
    "rouge_l": rouge_l,
    "number": number,
    "edit": edit,
    "boxed": boxed,
    "choice": choice,
}


def _f1(common: int, found: int, right: int) -> float:
    return 2 * common / (found + right) if common else 0.0


def _normal(text: str) -> str:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept)


def _spaced(text: str) -> str:
    """Every character that is no punctuation as a word of its own."""
    return " ".join(re.findall(r"[^\W_]", text))
