"""A gate for report texts: counts reports that seem to hold protected health information, and never repeats the text.

The patterns follow the identifiers of the HIPAA Safe Harbor list (45 CFR 164.514(b)(2)) that occur in radiology
reports. This is a gate and no de-identification: it misses identifiers without a typical form, e.g. a surname without a
title (studies/results/programs.csv has what it misses). Only a person can decide that reports are safe.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from fedvlp.core.site_error import SiteError
from fedvlp.data.text_restoration import mask_marks, without_unseen

# A search takes time in proportion to the text, whatever it is: reports come from elsewhere, and columns of fixed width
# are padded with blanks. So runs of whitespace are one character before a search (``_collapsed``), a pattern asks for
# one at most (``\s?``), and what else repeats has an upper bound, or cannot begin again within its own run.
_UPPER = "A-Z\u00c0-\u00d6\u00d8-\u00de"  # with the letters of western Europe, as in all names below
_LETTER = _UPPER + "a-z\u00df-\u00f6\u00f8-\u00ff\u0100-\u017f'\u2019-"
_REMOVED = r"[Xx]{1,40}\b"  # a run of X is a removed name
_NAME = rf"(?!{_REMOVED})[{_UPPER}][{_LETTER}]{{1,40}}"
_BEFORE_NAME = (
    rf"(?:[{_UPPER}]\.\s?){{0,5}}(?:(?i:van|von|de|der|den|da|di|la|le|el|al)\s){{0,5}}"  # initials, particles
)
_BODY = (  # what "MR" and "DR" (magnetic resonance, digital radiography) stand before
    "abdom[a-z]{2,4}|ankle|aort[a-z]{1,2}|arm|arthro[a-z]{1,5}|angio[a-z]{1,6}|axial|bilateral|bladder|bone|bowel|brain|"
    "breasts?|card[a-z]{2,7}|carotids?|cervical|chest|cholangio[a-z]{1,14}|compatible|conditional|contrast|coronal|"
    "[clt][- ]?spine|elbow|entero[a-z]{2,6}|exam[a-z]{0,7}|extremit[a-z]{1,3}|femur|fetal|findings|foot|forearm|"
    "guided|hands?|head|heart|hips?|humerus|images?|imaging|kidneys?|knees?|left|legs?|liver|lower|lumbar|lumbosacral|"
    "lungs?|mammo[a-z]{2,6}|mediastin[a-z]{2,3}|myelo[a-z]{2,6}|neck|orbits?|pancrea[a-z]{1,4}|pelvi[a-z]{1,2}|perfusion|"
    "pituitary|portable|prostate|protocol|radiographs?|rectum|renal|right|sacr[a-z]{2,3}|safe|sagittal|scans?|sella|"
    "sequences?|shoulders?|sinus(?:es)?|skull|spectro[a-z]{2,6}|spine|study|studies|tibia|thigh|thora[a-z]{1,4}|upper|"
    "uro[a-z]{2,6}|unsafe|venogr[a-z]{2,5}|whole|wrists?"
)

# Months of German and Romance languages and Dutch, whole and as people shorten them.
_MONTHS_ELSEWHERE = (
    "januari?|j[äa]nner|febru?ari?|feber|m[äa]e?rz?|mrz|maart|april[ei]?|mai|mei|juni|juli|augustus|okt(?:ober)?|dez(?:ember)?"
    "|jan(?:v(?:ier)?|eiro)|f[ée]v(?:r(?:ier)?|ereiro)?|mars|avr(?:il)?|juin|juil(?:let)?|ao[ûu]t|septembre|octobre"
    "|novembre|d[ée]c(?:embre)?|ene(?:ro)?|febrero|marzo|abr(?:il)?|mayo|junio|julio|ago(?:sto)?|sep?tiembre|octubre"
    "|noviembre|dic(?:iembre)?|gen(?:naio)?|febbraio|aprile|mag(?:gio)?|giu(?:gno)?|lug(?:lio)?|set(?:t(?:embre)?|embro)?"
    "|ott(?:obre)?|dic(?:embre)?|mar[çc]o|maio|junho|julho|out(?:ubro)?|nov(?:embro)?|dez(?:embro)?"
    "|ianuarie|februarie|martie|aprilie|iunie|iulie|septembrie|octombrie|noiembrie|decembrie"
    "|gener|febrer|maig|juny|juliol|agost|setembre|desembre"
)
_MONTHS = "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
_MONTH = rf"(?:{_MONTHS}|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
_ANY_MONTH = rf"(?i:{_MONTHS}|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?|{_MONTHS_ELSEWHERE})"
_WHOLE_ELSEWHERE = (  # and no shorter: without a year "5. mar" is anything
    "(?i:januar|februar|märz|maerz|april[ei]?|mai|juni|juli|august|september|oktober|november|dezember|janvier|février"
    "|mars|avril|juin|juillet|août|septembre|octobre|novembre|décembre|enero|febrero|marzo|abril|mayo|junio|julio|agosto"
    "|sep?tiembre|octubre|noviembre|diciembre|gennaio|febbraio|maggio|giugno|luglio|settembre|ottobre|dicembre|janeiro"
    "|fevereiro|março|maio|junho|julho|setembro|outubro|novembro|dezembro)"
)
_NO_NUMBER = r"(?<![\d./-])(?<!\d,)"  # a date's first number is the end of no other
_WHOLE_MONTH = "(?:January|February|March|April|June|July|August|September|October|November|December)"  # not "may"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_YEAR = r"(?:19|20)\d{2}"
_LEVELS = r"(?:8[/.-]9[/.-]10|9[/.-]10[/.-]11|10[/.-]11[/.-]12)(?:ths?)?"  # three ribs or vertebrae in a row, or a date
_BONES = (
    *("rib", "ribs", "fracture", "fractures", "level", "levels", "vertebra", "vertebrae"),
    *("left", "right", "anterior", "posterior", "lateral"),  # ribs
)
_NO_LEVELS = (  # so that three such numbers are a date: no bone stands before them, and none behind
    "".join(rf"(?<!(?i:\b{word})[\s:(#])" for word in _BONES)
    + r"(?<![TLD])(?<!Th)(?<!\d,\s)(?<!\dand\s)(?<!\d\sand\s)(?<!\d\s&\s)"
    + rf"(?!{_LEVELS}\s(?i:(?:left|right|anterior|posterior|lateral)\s){{0,2}}(?i:ribs?|vertebra[el]?)\b)"
)

_NO_CREDIT = r"(?<!(?i:courtesy\sof)\s)(?<!(?i:contributed\sby)\s)"  # these credit the author of a published case
_STREET = r"(?:street|st\.?|avenue|ave\.?|road|rd\.?|lane|drive|boulevard|blvd\.?|square|stra\u00dfe|strasse)"
_OVER_89 = r"(?:9\d|1[01]\d)"
_NUMBER = r"(?:\s?(?:number|num|no\.?|#|id))?\s?"  # before a number: "no. "

KINDS: dict[str, re.Pattern[str]] = {
    "name with title": re.compile(
        rf"{_NO_CREDIT}\b(?:Dr|Mr|Mrs|Ms|Miss|Prof|Doctor|Professor|Herr|Frau|Dott|Sig|Mme|Sr|Sra|MRS|MS|PROF|DOCTOR"
        rf"|(?:MR|DR)(?!\s(?i:{_BODY})\b))\b\.?"
        rf"\s{_BEFORE_NAME}{_NAME}"
        # in small letters where nothing else is so written: "DR artefact", "MR imaging" and "Ms" without a dot are
        rf"|{_NO_CREDIT}\b(?:[Dd]r\.?|DR\.|Mr\.|Mrs\.?|Ms\.|Prof\.)\s(?!{_REMOVED})[{_LETTER}]{{2,40}}"
    ),
    "labelled name": re.compile(
        r"\b(?i:patient(?:'s)?\sname|patient|pt|name|signed\sby|dictated\sby|read\sby|referr(?:ed|ing)\s(?:by|physician))"
        rf"\s?:\s?{_BEFORE_NAME}{_NAME}"
    ),
    "record number": re.compile(
        r"\b(?:MRN|medical\srecord|record|patient\sid|hospital|nhs|ssn|social\ssecurity|insurance)\b"
        rf"{_NUMBER}[:#]?\s?[A-Z]{{0,4}}[- ]?\d[\d -]{{4,}}",
        re.IGNORECASE,
    ),
    "accession-like id": re.compile(
        rf"\b(?:acc(?:ession)?|exam|order|study|case){_NUMBER}[:#]\s?[A-Z]{{0,5}}-?\d{{4,}}"
        rf"|\bref(?:erence)?\.?{_NUMBER}:?\s?[A-Z]{{0,5}}-?\d{{5,}}"
        r"|\b[A-Z]{1,5}-?\d{6,}\b|(?<![\d.])\d{7,}(?!\.?\d)",
        re.IGNORECASE,
    ),
    "date": re.compile(
        rf"(?<![\d.])(?=\d)(?:(?!{_LEVELS})|{_NO_LEVELS})"
        rf"(?:\d{{1,2}}([/.-])\d{{1,2}}\1(?:19|20)?\d{{2}}|{_YEAR}([/.-])\d{{1,2}}\2\d{{1,2}})(?![\d.]\d)\b"
        rf"|\b(?:{_DAY}[\s-]{{1,3}})?(?i:{_MONTH}),?[\s-]{{1,3}}{_YEAR}\b"
        rf"|\b(?i:{_MONTH})\s{_DAY},?\s{_YEAR}\b"
        rf"|\b(?:{_WHOLE_MONTH}\s{_DAY}|{_DAY}\s(?:{_WHOLE_MONTH}|May))(?!\s?[cm]m)\b"
        rf"|{_NO_NUMBER}{_YEAR}([/-])\d{{2}}\3\d{{2}}T\d{{2}}"  # ISO 8601 with a time
        rf"|{_NO_NUMBER}(?:0?[1-9]|1[0-2])/{_YEAR}(?![\d/])"
        rf"|{_NO_NUMBER}(?:0[1-9]|1[0-2])[.-]{_YEAR}(?![\d.-])(?!\s?[cm][ml])"
        rf"|{_NO_NUMBER}{_YEAR}[/-](?:0[1-9]|1[0-2])(?![\d/.-])"
        rf"|{_NO_NUMBER}\d{{1,2}}(?:[-/.]\s?{_ANY_MONTH}\.?[-/.\s]|\s?{_ANY_MONTH}\.?\s?'?)"
        r"(?:(?:19|20)\d{2}|(?<![a-z]\s)\d{2})(?![\d.]?\d)"  # "14-MAR-31"; "5 mar 12" is none
        rf"|{_NO_NUMBER}\d{{1,2}}(?:\.|er|º|ª|°)?\s?(?i:(?:de|del|di|d['\u2019]|of)\s?)?{_ANY_MONTH}\b\.?,?\s?"
        rf"(?i:(?:de|del)\s)?{_YEAR}\b"
        rf"|\b(?i:(?:{_MONTHS_ELSEWHERE}))\b\.?,?\s(?i:(?:de|del)\s)?{_YEAR}\b"
        rf"|{_NO_NUMBER}\d{{1,2}}(?:\.\s?|\s(?:(?i:de|di)\s)?|er\s){_WHOLE_ELSEWHERE}\b"
        rf"|\b(?i:vom|am|zum|seit|del?|dal?|du|le)\s\d{{1,2}}\.\s?(?:0?[1-9]|1[0-2])\.(?!\d)",
    ),
    "phone": re.compile(
        r"(?<![\d.])(?:\+\d{1,3}[ .-]?)?\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?!\d)"
        r"|(?<!\d)\+(?=(?:[ ().-]{0,2}\d){8,15}(?!\d))\d[\d ().-]{1,50}\d"
        r"|\b(?:tel|phone|fax|pager|ext)\b\.?\s?(?:no\.?)?\s?:?\s?\+?[\d(][\d ()./-]{3,}"
        r"|\b(?:at|call|called|calling|number|phone)\s\d{3}-\d{4}\b",
        re.IGNORECASE,
    ),
    "address": re.compile(
        rf"\b\d{{1,5}}\s(?:[NSEW]\.?\s)?(?:St\.\s)?(?:{_NAME}\s){{1,3}}(?i:{_STREET})(?![a-z])"
        rf"|\b{_NAME}(?:stra\u00dfe|strasse)\s\d"
        rf"|\b(?:\d{{1,5}},?\s)(?:rue|avenue|via|calle|rua)\s{_NAME}|\b(?i:p\.?\s?o\.?\sbox)\s\d"
    ),
    "email or link": re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.]+|\bhttps?://\S+|\bwww\.\S+", re.IGNORECASE),
    "age above 89": re.compile(
        rf"\b{_OVER_89}(?:\s?-?\s?(?:years?|yrs?)\s?-?\s?old|\s?-?\s?y\.?/?o\b|[MF])\b|\b(?i:aged?)\s{_OVER_89}\b"
        r"(?!\s?(?:days|weeks|months))"
    ),
}
"""What a report is searched for, with a single character between two words: ``spans`` makes it so."""


_WHITESPACE = re.compile(r"\s{2,}|[^\S \n]")  # but single blanks and line breaks, which stay

Accepted = bool | Collection[str]
"""What a person accepts of that which ``scan`` finds: True is every kind, False none, else these kinds of ``KINDS``."""

SHOWN = 1000
"""Different words of each kind that are remembered for ``fedvlp prepare --show-findings``; all reports are counted."""

PLACES = 5
"""Findings that are remembered of the same words."""

CONTEXT = 30
"""Characters of a report before and after the words of a finding, at most."""


class PHIError(SiteError, ValueError):
    """The reports seem to identify people. The message holds counts only."""


@dataclass(frozen=True, repr=False)
class IdentifierFinding:
    """Words of a report that seem to identify somebody, for the eyes of who owns it: they belong on no log and no file.

    So it has no representation that shows them.
    """

    where: str  # the report: its row in the table (row 1 is below the header), or its name in the collection
    kind: str  # of KINDS
    before: str  # what stands before the words, at most CONTEXT characters
    words: str
    after: str

    @property
    def same(self) -> tuple[str, str]:
        """Kind and words, the same for findings that differ in blanks and capitals alone."""
        return self.kind, " ".join(self.words.split()).casefold()


class Findings(dict[str, int]):
    """Kind of identifier (of ``KINDS``) -> number of reports that hold one; kinds that do not occur are left out.

    ``shown`` remembers the words themselves; a copy, as ``dict`` or by pickle, holds counts alone.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        shown: Iterable[IdentifierFinding] = (),
        reports: Mapping[tuple[str, str], int] = {},
    ) -> None:
        super().__init__(counts)
        self.shown = tuple(shown)
        self.reports = reports  # kind and words, as ``Finding.same`` has them -> reports that hold these words

    def __reduce__(self) -> tuple[type, tuple[dict[str, int]]]:
        return dict, (dict(self),)


def scan(reports: Iterable[str], where: Iterable[object] | None = None) -> Findings:
    """What is found in the ``reports``. ``where`` says of each what ``Finding.where`` is; None: 1, 2, ..."""
    counts = dict.fromkeys(KINDS, 0)
    shown: dict[tuple[str, str], list[IdentifierFinding]] = {}  # by kind and words
    distinct, holding = Counter[str](), Counter[tuple[str, str]]()
    for name, report in zip(count(1) if where is None else where, reports, strict=False):
        matches = spans(report)
        for kind in {kind for kind, _, _ in matches}:
            counts[kind] += 1
        findings = [_finding(str(name), kind, report, start, end) for kind, start, end in matches]
        for finding in findings:
            if finding.same not in shown and distinct[finding.kind] < SHOWN:
                shown[finding.same] = []
                distinct[finding.kind] += 1
            if len(shown.get(finding.same, range(PLACES))) < PLACES:
                shown[finding.same].append(finding)
        holding.update({finding.same for finding in findings} & shown.keys())
    return Findings(
        {kind: number for kind, number in counts.items() if number},
        (finding for kind in KINDS for (of, _), same in shown.items() if of == kind for finding in same),
        holding,
    )


def spans(report: str) -> list[tuple[str, int, int]]:
    """What is found in a report: its kind, and where its words begin and end; kind by kind."""
    masked = mask_marks(report)
    seen = without_unseen(masked)
    shown = masked if len(seen) == len(masked) else "".join(masked[index] for index in seen)
    text = _collapsed(shown)
    matches = [(kind, *match.span()) for kind, pattern in KINDS.items() for match in pattern.finditer(text)]
    if not matches or text == report:
        return matches
    # of each character of the text, where it is in the report
    indices = [seen[index] for index, letter in enumerate(shown) if not _goes_on(letter, shown[index - 1 : index])]
    return [(kind, indices[start], indices[end - 1] + 1) for kind, start, end in matches]


def _collapsed(report: str) -> str:
    """The report with one character for each run of whitespace: a line break if it holds one, else a blank."""
    return _WHITESPACE.sub(lambda run: " " if run[0].splitlines() == [run[0]] else "\n", report)


def _goes_on(letter: str, before: str) -> bool:
    """Whether ``letter`` continues a run of whitespace that it does not begin."""
    return letter.isspace() and before.isspace()


def _finding(where: str, kind: str, report: str, start: int, end: int) -> IdentifierFinding:
    before, after = report[max(0, start - CONTEXT) : start], report[end : end + CONTEXT]
    return IdentifierFinding(where, kind, before, report[start:end], after)


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
            "De-identify them: fedvlp prepare DATA --out cache --show-findings shows on your terminal which words are "
            "meant. Or, if a "
            "person has looked at them, accept the risk at this site, all of it or that of a kind: "
            '"accept_phi_risk": true or ["date"] in local/fedvlp.json, --accept-phi-risk or --accept-phi-kind date on '
            "the command line",
            public="the reports seem to identify people, so nothing is trained on them ({records} records)",
            records=records,
        )
