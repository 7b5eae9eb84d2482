"""Report text as the towers see it, after the MGCA code base (Wang et al., 2022, https://arxiv.org/abs/2210.06044)."""

from __future__ import annotations

import re
import unicodedata

_SENTENCE_END = re.compile(r"[0-9]+\.|\.")  # list numbers ("1.") and full stops
_TOKEN = re.compile(r"\w+")
_MISSING = frozenset({"", "nan", "none", "null", "na", "n/a"})


def is_missing(text: str) -> bool:
    """True for an empty, blank or not-a-number table cell."""
    return text.strip().lower() in _MISSING


def clean_report(text: str, min_words: int = 3) -> str:
    """Lower-case ASCII words joined by spaces; "" when fewer than ``min_words`` remain.

    Sentences end at "." and "<digits>."; those of one word or fewer are dropped.
    Differs: accented letters keep their base letter ("pneumonía" is "pneumonia", upstream "pneumona").
    """
    words: list[str] = []
    for sentence in _SENTENCE_END.split(unicodedata.normalize("NFC", text)):
        tokens = [ascii_ for token in _TOKEN.findall(sentence.lower()) if (ascii_ := _fold(token))]
        if len(tokens) > 1:
            words += tokens
    return " ".join(words) if len(words) >= min_words else ""


def _fold(token: str) -> str:
    if token.isascii():
        return token
    return unicodedata.normalize("NFKD", token).encode("ascii", "ignore").decode("ascii")
