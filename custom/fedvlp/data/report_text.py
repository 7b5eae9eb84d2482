"""Report text as the towers see it, after the MGCA code base (Wang et al., 2022, https://arxiv.org/abs/2210.06044)."""

from __future__ import annotations

import re
import unicodedata

_SENTENCE_END = re.compile(r"[0-9]+\.|\.")  # list numbers ("1.") and full stops
_TOKEN = re.compile(r"\w+")
_HEADING = re.compile(r"^[ \t]*([A-Z][A-Z0-9 \t/,&()-]*[A-Z)]):", re.MULTILINE)  # in capitals, first of its line
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


def sections(report: str) -> dict[str, str]:
    """The sections of a report by their upper-case headings ("FINDINGS:"); what comes before the first is left out.

    Sections of one name are joined. "FINDING", "FINAL IMPRESSION" and the like count as FINDINGS and IMPRESSION; a
    section of both counts as FINDINGS.
    """
    parts: dict[str, str] = {}
    _, *pieces = _HEADING.split(report)  # heading, text, heading, text, ...
    for heading, text in zip(pieces[::2], pieces[1::2], strict=True):
        name = "FINDINGS" if "FINDING" in heading else "IMPRESSION" if "IMPRESSION" in heading else heading
        parts[name] = f"{parts.get(name, '')} {text.strip()}".strip()
    return parts


def _fold(token: str) -> str:
    if token.isascii():
        return token
    return unicodedata.normalize("NFKD", token).encode("ascii", "ignore").decode("ascii")
