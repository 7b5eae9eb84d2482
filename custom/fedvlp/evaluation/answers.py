"""Answers as VQA's authors compare them: normalised text, and agreement with ten people.

Antol et al., 2015 (https://arxiv.org/abs/1505.00468); the steps of the normalisation are those of
https://visualqa.org/evaluation. Differs: their program leaves answers as they are where all ten people agree to the
letter; here every answer is normalised. Their list of contractions is longer by misspellings.
"""

from __future__ import annotations

import re
import string
from functools import lru_cache

from torch import Tensor

ARTICLES = frozenset(("a", "an", "the"))
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS = {word: str(value) for value, word in enumerate(DIGITS)} | {"none": "0"}
NEGATED = (
    "ain", "aren", "can", "couldn", "didn", "doesn", "don", "hadn", "hasn", "haven", "isn", "mightn", "mustn", "needn",
    "shouldn", "wasn", "weren", "won", "wouldn",
)  # fmt: skip
CONTRACTED = (
    "could've", "he's", "how'd", "how's", "i'm", "i've", "it'd", "it'll", "ma'am", "might've", "must've",
    "o'clock", "she's", "should've", "somebody's", "someone's", "something's", "that'd", "that'll", "that's",
    "there'd", "there's", "they'd", "they'll", "they're", "they've", "we've", "what'd", "what'll", "what're", "what's",
    "when's", "where'd", "where's", "who'd", "who'll", "who's", "who've", "why's", "would've", "y'all", "you'd",
    "you'll", "you're", "you've",
)  # fmt: skip
"""Only those that are no other word without their apostrophe, as "were", "well", "ill", "id" and "its" are."""

CONTRACTIONS = {f"{stem}t": f"{stem}'t" for stem in NEGATED} | {word.replace("'", ""): word for word in CONTRACTED}
"""Contraction without its apostrophe -> with it."""

_PERIOD = re.compile(r"\.(?!\d)")  # one that no digit follows is no decimal point
_COMMA = re.compile(r"(?<=\d),(?=\d)")
_PUNCTUATION = str.maketrans(dict.fromkeys(set(string.punctuation) - set("'.:"), " "))


@lru_cache(maxsize=2**18)  # people give the same answers to millions of questions
def normalised(answer: str) -> str:
    """The answer in lower case, without periods, articles and punctuation, numbers as digits, contractions whole.

    Apostrophes, colons and decimal points stay; a comma between digits goes without leaving a space.
    """
    text = _COMMA.sub("", _PERIOD.sub("", answer.lower())).translate(_PUNCTUATION)
    words = (NUMBERS.get(word, word) for word in text.split() if word not in ARTICLES)
    return " ".join(CONTRACTIONS.get(word, word) for word in words)


def soft_scores(matches: Tensor, people: Tensor) -> Tensor:
    """min(matches / 3, 1), what a head is trained on; of fewer than three people, the share that gave the answer."""
    return (matches.double() / people.clamp(max=3)).clamp(max=1)


def official_accuracy(matches: Tensor, people: Tensor) -> Tensor:
    """Mean over all subsets with one person less of min(matches among them / 3, 1), 0..1.

    ``matches``: how many of the ``people`` gave the answer; shapes that broadcast. With m of n, m subsets have lost one
    that matches. A single person tells the truth: 1 or 0.
    """
    m, n = matches.double(), people.double()
    fewer = soft_scores((m - 1).clamp(min=0), n - 1)
    mean = (m * fewer + (n - m) * soft_scores(m, n - 1)) / n
    return mean.where(n > 1, m)
