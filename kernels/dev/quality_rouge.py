"""ROUGE-1, ROUGE-2 and ROUGE-L between two texts (Lin 2004), as F1 over words: lower-case runs of
letters and digits, as Google's `rouge_score` without stemming."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Rouge:
    """F1 scores between 0 and 1."""

    rouge1: float
    rouge2: float
    rouge_l: float


def rouge(reference: str, text: str) -> Rouge:
    """F1 of the words that `reference` and `text` share; 1 for the same words, even none or one."""
    expected, found = (_WORD.findall(given.lower()) for given in (reference, text))
    if expected == found:
        return Rouge(1.0, 1.0, 1.0)
    return Rouge(
        _overlap(_n_grams(expected, 1), _n_grams(found, 1)),
        _overlap(_n_grams(expected, 2), _n_grams(found, 2)),
        _f1(_longest_common(expected, found), len(expected), len(found)),
    )


def mean_rouge(scores: Sequence[Rouge]) -> Rouge:
    """The mean of each score."""
    count = len(scores)
    return Rouge(
        sum(found.rouge1 for found in scores) / count,
        sum(found.rouge2 for found in scores) / count,
        sum(found.rouge_l for found in scores) / count,
    )


def _n_grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _overlap(expected: Counter[tuple[str, ...]], found: Counter[tuple[str, ...]]) -> float:
    return _f1((expected & found).total(), expected.total(), found.total())


def _f1(common: int, expected: int, found: int) -> float:
    return 2 * common / (expected + found) if common else 0.0


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    above = [0] * (len(b) + 1)
    for word in a:
        row = [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        above = row
    return above[-1]
