"""A gate for report texts: counts reports that seem to hold protected health information, and never repeats the text.

The patterns follow the identifiers of the HIPAA Safe Harbor list (45 CFR 164.514(b)(2)) that occur in radiology
reports. This is a gate and no de-identification: it misses identifiers without a typical form, e.g. a surname without a
title (benchmarks/identifiers.py measures what it misses). Only a person can decide that reports are safe.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

_UPPER = "A-Z\u00c0-\u00d6\u00d8-\u00de"  # with the letters of western Europe, as in all names below
_LETTER = _UPPER + "a-z\u00df-\u00f6\u00f8-\u00ff\u0100-\u017f'\u2019-"
_REMOVED = r"[Xx]+\b"  # a run of X is a removed name
_NAME = rf"(?!{_REMOVED})[{_UPPER}][{_LETTER}]+"
_BEFORE_NAME = rf"(?:[{_UPPER}]\.\s*)*(?:(?i:van|von|de|der|den|da|di|la|le|el|al)\s+)*"  # initials, particles

_MONTHS = "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
_MONTH = rf"(?:{_MONTHS}|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
_WHOLE_MONTH = "(?:January|February|March|April|June|July|August|September|October|November|December)"  # not "may"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_YEAR = r"(?:19|20)\d{2}"

_STREET = r"(?:street|st\.?|avenue|ave\.?|road|rd\.?|lane|drive|boulevard|blvd\.?|square|stra\u00dfe|strasse)"
_OVER_89 = r"(?:9\d|1[01]\d)"

KINDS: dict[str, re.Pattern[str]] = {
    "name with title": re.compile(
        r"\b(?:Dr|Mr|Mrs|Ms|Miss|Prof|Doctor|Professor|Herr|Frau|Dott|Sig|Mme|Sr|Sra|DR|MR|MRS|MS|PROF|DOCTOR)\b\.?"
        rf"\s+{_BEFORE_NAME}{_NAME}"
        # in small letters where nothing else is so written: "DR artefact", "MR imaging" and "Ms" without a dot are
        rf"|\b(?:[Dd]r\.?|DR\.|Mr\.|Mrs\.?|Ms\.|Prof\.)\s+(?!{_REMOVED})[{_LETTER}]{{2,}}"
    ),
    "labelled name": re.compile(
        r"\b(?i:patient(?:'s)? name|patient|pt|name|signed by|dictated by|read by|referr(?:ed|ing) (?:by|physician))"
        rf"\s*:\s*{_BEFORE_NAME}{_NAME}"
    ),
    "record number": re.compile(
        r"\b(?:MRN|medical record|record|patient id|hospital|nhs|ssn|social security|insurance)\b"
        r"(?:\s*(?:number|num|no\.?|#|id))?\s*[:#]?\s*[A-Z]{0,4}[- ]?\d[\d -]{4,}",
        re.IGNORECASE,
    ),
    "accession-like id": re.compile(
        r"\b(?:acc(?:ession)?|exam|order|study|case)\s*(?:number|num|no\.?|#|id)?\s*[:#]\s*[A-Z]{0,5}-?\d{4,}"
        r"|\bref(?:erence)?\.?\s*(?:number|num|no\.?|#|id)?\s*:?\s*[A-Z]{0,5}-?\d{5,}"
        r"|\b[A-Z]{1,5}-?\d{6,}\b|(?<![\d.])\d{7,}(?!\.?\d)",
        re.IGNORECASE,
    ),
    "date": re.compile(
        rf"(?<![\d.])(?:\d{{1,2}}([/.-])\d{{1,2}}\1(?:19|20)?\d{{2}}|{_YEAR}([/.-])\d{{1,2}}\2\d{{1,2}})"
        r"(?![\d.]\d)\b"
        rf"|\b(?:{_DAY}[\s-]+)?(?i:{_MONTH}),?[\s-]+{_YEAR}\b"
        rf"|\b(?i:{_MONTH})\s+{_DAY},?\s+{_YEAR}\b"
        rf"|\b(?:{_WHOLE_MONTH}\s+{_DAY}|{_DAY}\s+(?:{_WHOLE_MONTH}|May))(?!\s*[cm]m)\b",
    ),
    "phone": re.compile(
        r"(?<![\d.])(?:\+\d{1,3}[ .-]?)?\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?!\d)"
        r"|(?<!\d)\+(?=(?:[ ().-]{0,2}\d){8,15}(?!\d))\d[\d ().-]+\d"
        r"|\b(?:tel|phone|fax|pager|ext)\b\.?\s*(?:no\.?)?\s*:?\s*\+?[\d(][\d ()./-]{3,}"
        r"|\b(?:at|call|called|calling|number|phone)\s+\d{3}-\d{4}\b",
        re.IGNORECASE,
    ),
    "address": re.compile(
        rf"\b\d{{1,5}}\s+(?:[NSEW]\.?\s+)?(?:St\.\s+)?(?:{_NAME}\s+){{1,3}}(?i:{_STREET})(?![a-z])"
        rf"|\b{_NAME}(?:stra\u00dfe|strasse)\s+\d"
        rf"|\b(?:\d{{1,5}},?\s+)(?:rue|avenue|via|calle|rua)\s+{_NAME}|\b(?i:p\.?\s?o\.?\s+box)\s+\d"
    ),
    "email or link": re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.]+|\bhttps?://\S+|\bwww\.\S+", re.IGNORECASE),
    "age above 89": re.compile(
        rf"\b{_OVER_89}(?:\s*-?\s*(?:years?|yrs?)\s*-?\s*old|\s*-?\s*y\.?/?o\b|[MF])\b|\b(?i:aged?)\s+{_OVER_89}\b"
        r"(?!\s*(?:days|weeks|months))"
    ),
}


Accepted = bool | Collection[str]
"""What a person accepts of that which ``scan`` finds: True is every kind, False none, else these kinds of ``KINDS``."""

SHOWN = 1000
"""Findings of each kind that are remembered for ``fedvlp prepare --show-findings``; all reports are counted."""

CONTEXT = 30
"""Characters of a report before and after the words of a finding, at most."""


class PHIError(ValueError):
    """The reports seem to identify people. The message holds counts only."""


@dataclass(frozen=True, repr=False)
class Finding:
    """Words of a report that seem to identify somebody, for the eyes of who owns it: they belong on no log and no file.

    So it has no representation that shows them.
    """

    where: str  # the report: its row in the table (row 1 is below the header), or its name in the collection
    kind: str  # of KINDS
    before: str  # what stands before the words, at most CONTEXT characters
    words: str
    after: str


class Findings(dict[str, int]):
    """Kind of identifier (of ``KINDS``) -> number of reports that hold one; kinds that do not occur are left out.

    ``shown`` remembers the words themselves; a copy, as ``dict`` or by pickle, holds counts alone.
    """

    def __init__(self, counts: Mapping[str, int], shown: Iterable[Finding] = ()) -> None:
        super().__init__(counts)
        self.shown = tuple(shown)

    def __reduce__(self) -> tuple[type, tuple[dict[str, int]]]:
        return dict, (dict(self),)


def scan(reports: Iterable[str], where: Iterable[object] | None = None) -> Findings:
    """What is found in the ``reports``. ``where`` says of each what ``Finding.where`` is; None: 1, 2, ..."""
    counts = dict.fromkeys(KINDS, 0)
    shown: dict[str, list[Finding]] = {kind: [] for kind in KINDS}
    for name, report in zip(count(1) if where is None else where, reports, strict=False):
        for kind, pattern in KINDS.items():
            if pattern.search(report) is None:
                continue
            counts[kind] += 1
            if len(shown[kind]) < SHOWN:
                shown[kind] += (_finding(str(name), kind, report, match) for match in pattern.finditer(report))
    return Findings(
        {kind: number for kind, number in counts.items() if number},
        (finding for kind in KINDS for finding in shown[kind][:SHOWN]),
    )


def _finding(where: str, kind: str, report: str, match: re.Match[str]) -> Finding:
    start, end = match.span()
    return Finding(where, kind, report[max(0, start - CONTEXT) : start], match[0], report[end : end + CONTEXT])


def kinds_of(names: Iterable[str]) -> tuple[str, ...]:
    """The kinds of identifiers that are called so; "name-with-title" is "name with title".

    Raises ValueError that lists them all for a name that is none of them.
    """
    known = {_plain(kind): kind for kind in KINDS}
    wanted = list(map(str, names))
    for name in wanted:
        if _plain(name) not in known:
            listed = ", ".join(kind.replace(" ", "-") for kind in KINDS)
            raise ValueError(f"unknown kind of identifier {name!r}; there are: {listed}")
    return tuple(dict.fromkeys(known[_plain(name)] for name in wanted))


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", " ").replace("_", " ")


def refuse_phi(phi: Mapping[str, int], records: int, accepted: Accepted = False) -> None:
    """Raises PHIError if ``phi``, the result of ``scan`` over ``records`` records, counts what is not ``accepted``."""
    if accepted is True:
        return
    left = set(phi) - set(accepted or ())
    if left:
        counts = ", ".join(f"{kind} in {phi[kind]}" for kind in sorted(left))
        raise PHIError(
            f"the reports seem to identify people, so nothing is trained on them ({records} records: {counts}). "
            "De-identify them: fedvlp prepare --show-findings shows on your terminal which words are meant. Or, if a "
            "person has looked at them, accept the risk at this site, all of it or that of a kind: "
            '"accept_phi_risk": true or ["date"] in local/fedvlp.json, --accept-phi-risk or --accept-phi-kind date on '
            "the command line"
        )
