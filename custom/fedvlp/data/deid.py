"""A gate for report texts: counts reports that seem to hold protected health information, and never repeats the text.

The patterns follow the identifiers of the HIPAA Safe Harbor list (45 CFR 164.514(b)(2)) that occur in radiology
reports. This is a gate and no de-identification: it misses identifiers without a typical form, e.g. a surname without a
title. Only a person can decide that reports are safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|sept|oct|nov|dec)[a-z]*\.?"
_NAME = r"(?!X+\b)[A-Z][A-Za-z'\u2019-]+"  # a run of X is a removed name
_STREET = r"(?:street|st\.|avenue|ave\.?|road|rd\.?|lane|drive|boulevard|blvd\.?|square|straße|strasse|rue|via)"

KINDS: dict[str, re.Pattern[str]] = {
    "name with title": re.compile(
        rf"\b(?:Dr|Mr|Mrs|Ms|Miss|Prof|Doctor|Professor|Herr|Frau|Dott|Sig|Mme|Sr|Sra|DR|MR|MRS|MS|PROF)\b\.?\s+{_NAME}"
        r"|\bdr\.?\s+(?!x+\b)[a-z]{2,}"
    ),
    "labelled name": re.compile(
        rf"(?:(?i:patient(?:'s)? name|patient|name|signed by|dictated by|read by|referr(?:ed|ing) (?:by|physician)))"
        rf"\s*:\s*{_NAME}"
    ),
    "record number": re.compile(
        r"\b(?:MRN|medical record|record|patient id|hospital|nhs|ssn|social security|insurance)\b"
        r"(?:\s*(?:number|num|no\.?|#|id))?\s*[:#]?\s*[A-Z]{0,4}[- ]?\d[\d -]{4,}",
        re.IGNORECASE,
    ),
    "accession-like id": re.compile(
        r"\b(?:acc(?:ession)?|exam|order|study|case)\s*(?:number|num|no\.?|#|id)?\s*[:#]\s*[A-Z]{0,5}-?\d{4,}"
        r"|\b[A-Z]{1,5}-?\d{6,}\b|(?<![\d.])\d{7,}(?![\d.])",
        re.IGNORECASE,
    ),
    "date": re.compile(
        r"(?<![\d.])(?:\d{1,2}([/.-])\d{1,2}\1(?:19|20)?\d{2}|(?:19|20)\d{2}([/.-])\d{1,2}\2\d{1,2})(?![\d.]\d)\b"
        rf"|\b\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH},?\s+(?:19|20)\d{{2}}\b"
        rf"|\b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+(?:19|20)\d{{2}}\b",
        re.IGNORECASE,
    ),
    "phone": re.compile(
        r"(?<![\d.])(?:\+\d{1,3}[ .-]?)?\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?!\d)"
        r"|\b(?:tel|phone|fax|pager|ext)\b\.?\s*(?:no\.?)?\s*:?\s*\+?[\d(][\d ()./-]{4,}",
        re.IGNORECASE,
    ),
    "address": re.compile(
        rf"\b\d{{1,5}}\s+(?:{_NAME}\s+){{1,3}}(?i:{_STREET})(?![a-z])|\b{_NAME}(?:straße|strasse)\s+\d"
    ),
    "email or link": re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]+|\bhttps?://\S+", re.IGNORECASE),
}


class PHIError(ValueError):
    """The reports seem to identify people. The message holds counts only."""


def scan(reports: Iterable[str]) -> dict[str, int]:
    """Kind of identifier (of ``KINDS``) -> number of reports that hold one; kinds that do not occur are left out."""
    counts = dict.fromkeys(KINDS, 0)
    for report in reports:
        for kind, pattern in KINDS.items():
            counts[kind] += pattern.search(report) is not None
    return {kind: count for kind, count in counts.items() if count}


def refuse_phi(phi: Mapping[str, int], records: int) -> None:
    """Raises PHIError if ``phi``, the result of ``scan`` over ``records`` records, counts anything.

    Whoever accepts the risk does not call this.
    """
    if phi:
        counts = ", ".join(f"{kind} in {count}" for kind, count in sorted(phi.items()))
        raise PHIError(
            f"the reports seem to identify people, so nothing is trained on them ({records} records: {counts}). "
            "De-identify them; or, if a person has looked at them, accept the risk at this site: "
            '"accept_phi_risk": true in local/fedvlp.json, --accept-phi-risk on the command line'
        )
