"""Restores report text before its words are read: escapes, invisible characters, de-identification marks, signs.

Exports and PDF readers write line breaks as two characters, split words by characters that nobody sees, put marks in
the place of names, and radiologists answer with "(+)" and "(-)". Words alone would lose all of it: "clear.\\nNo
effusion" has no "no", and "effusion (-)" is "effusion (+)". Paths, LaTeX and the escapes of HL7 stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable

ESCAPES, INVISIBLE, MARKS, SIGNS = "escapes", "invisible characters", "de-identification marks", "signs"
KINDS = (ESCAPES, INVISIBLE, MARKS, SIGNS)
"""What ``restore`` restores, in this order: an escape may be one of an invisible character."""

# Escapes that were written out. A token that is a path, or a command of LaTeX, holds none: "C:\new", "\nu".

_PATH = re.compile(
    r"(?<!\S)(?:[\"'(]?[A-Za-z]:\\\S*|\\\\[\w.$-]+\\(?!\\)\S+"  # a drive's, a server's
    r"|[\w.$-]+(?:\\[\w.$-]+)+\.(?:txt|dcm|png|jpe?g|tiff?|docx?|pdf|xml|csv|exe|ini|rtf|html?)\b)"
)
_LATEX = (
    r"(?:nu|neq?|nabla|neg|newline|newpage|noindent|nonumber|node|normalsize|rho|right[a-z]*|rm|rangle|ref|rule"
    r"|raggedright|renewcommand|text[a-z]*|tau|theta|times|to|top|tilde|tan|triangle[a-z]*|tiny|title|table|tfrac|toprule)"
    r"(?![A-Za-z])"
)
_ESCAPE = re.compile(
    rf"\\{{1,4}}(?!{_LATEX})(?:(?P<blank>[nrt]|01[125])"
    r"|u(?P<four>[0-9A-Fa-f]{4})|U(?P<eight>[0-9A-Fa-f]{8})|(?P<plain>[\"'/]))"
    r"|(?P<bytes>(?:\\{1,4}x[0-9A-Fa-f]{2})+)(?!\\)"
    r"|(?P<line>(?:%0[AaDd]|=0[AD])+)"
    r"|(?P<utf>(?:([%=])[C-Fc-f][0-9A-Fa-f](?:\8[89ABab][0-9A-Fa-f]){1,3})+)"
)
# "links\rechts" may be two words that a backslash joins. It is an escape where the text has others that can be nothing
# else, or where a negation follows, which must not be lost.
_WITHIN_WORD = re.compile(r"[^\W\d_]\\[nrt][^\W\d_A-Z]")
_NEGATION = re.compile(
    r"(?i:no|not|non|none|nor|without|kein\w{0,2}|nicht|ohne|sin|sans|pas|senza|sem|n\u00e3o|geen|niet)\b"
)
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")

# Characters that nobody sees: soft hyphens (those of Word and PDF too), blanks of no width, marks of direction. Some
# systems print a soft hyphen as "\u00ac".

_UNSEEN = re.compile(
    "[\x00-\x08\x0e-\x1b\x1f\x7f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\ufff9-\ufffb\ufffe\U000e0000-\U000e0fff]+|(?<=[^\\W\\d_])\u00ac\\s?(?=[^\\W\\d_])"
)

# What de-identification put in the place of names, dates and places.

_HIDES = (
    r"(?:patient|pt|person|persons?|first|last|middle|sur|full|doctor|dr|physician|provider|radiologist|clinician|staff"
    r"|hospital|clinic|institution|organi[sz]ation|org|facility|vendor|company|location|loc|address|street|city|state"
    r"|country|zip(?:code)?|date|time|datetime|dob|year|month|day|age|sex|phone|fax|contact|tel|telephone|e-?mail|url|ip"
    r"|ids?|mrn|ssn|accession|number|num|record|phi|pii|names?|initials|profession|username|place"
    r"|redacted|removed|de-?identified|anonymi[sz]ed|masked|deleted|blank|hidden|suppressed"
    r"|datum|arzt|klinik|krankenhaus|ort|alter|geburtsdatum|nombre|apellidos?|fecha|paciente|m[eé]dico|nom|pr[eé]nom"
    r"|h[oô]pital|nome|cognome|paziente|data)"
)
_HIDDEN_WORDS = rf"(?:(?:us|medical|other)[ _-])?{_HIDES}(?:[ _-]{{1,2}}{_HIDES}){{0,3}}(?:[ _-]?\d{{1,4}})?"
_MARK = re.compile(
    r"\[\*\*.{0,200}?\*\*\]"  # MIMIC-III's
    # De-ID's and i2b2's: **NAME[AAA], **ID-NUM; "**No effusion**" is bold type
    rf"|\*\*(?=(?-i:[A-Z_-]+)(?![a-z])){_HIDDEN_WORDS}(?:\[[^\]\n]{{0,80}}\]|<[^>\n]{{0,80}}>|(?![\w*]))"
    rf"|<\s?{_HIDDEN_WORDS}\s?/?>|\[\s?{_HIDDEN_WORDS}\s?\]|\{{{{?\s?{_HIDDEN_WORDS}\s?\}}?\}}"
    r"|(?<![^\W_])(?:X{3,}(?:[-/.:]X{2,})*|X{2,}(?:[-/.:]X{2,})+)(?![^\W_])|X{4,}"  # in "53XXXX" as well
    r"|[█■]{1,}|(?<![*])\*{4,}(?![*])|(?<!#)#{3,}(?!#)|@{3,}",
    re.IGNORECASE,
)

# Signs in the place of words. A minus is one only where it can be nothing else: in brackets, behind the colon of a
# finding, or behind a finding in a text that has a plus there as well; else it is a dash, a hyphen or a bullet. An
# empty box is one only in a text that has a ticked one: "[ ]" is what templates leave open, too.

_PLUS, _MINUS = r"[+\uff0b\u2795]{1,4}", r"[-\u2212\u2010-\u2015\uff0d\u2796]{1,3}"
_ENDS = r"(?=\s*(?:$|[,;.)|\n]))"
_NEXT = (
    r"[^\W\d_]+(?:[ /-][^\W\d_]+){0,4}\s*[:=]\s*[-+\u2212\u2013\u2014\u00b1](?![\w-])"  # another finding and its sign
)
_BETWEEN = rf"(?:\s*(?:$|[,;.)|\n])|\s+{_NEXT})"
_BARE_PLUS = re.compile(rf"(?<=[^\W\d_]{{3}})\s?{_PLUS}{_ENDS}")
_BARE_MINUS = re.compile(rf"(?<=[^\W\d_]{{3}})\s?{_MINUS}(?=\s*(?:$|[,;.)|]))")
_TICKED = re.compile(r"\[[xX]\]|[\u2611\u2612]")
_EMPTY = re.compile(r"\[ {0,3}\]|\u2610")
_SIGN = re.compile(
    rf"(?:[\[(]\s*|(?<=[^\W\d_)])\s*[:=]\s*)(?P<doubt>{_PLUS}\s*/\s*{_MINUS}|\u00b1)(?:\s*[\])]|{_ENDS})"
    rf"|[\[(]\s*(?:(?P<plus>{_PLUS})|(?P<minus>{_MINUS}))\s*[\])]"
    rf"|(?P<of>[^\W\d_]+\)?)\s*[:=]\s*(?:(?P<is_plus>{_PLUS})|(?P<is_minus>{_MINUS}))(?={_BETWEEN})"
    rf"|(?<![\w+-])(?:(?P<plus_ve>\+)|(?P<minus_ve>[-\u2212\u2013]))ve\b"
    r"|(?P<yes>[\u2713\u2714\u2611\u2612\u2705]|\[[xX]\])|(?P<no>[\u2717\u2718\u274c\u274e])"
    r"|(?<![^\W_])(?P<none>\u2205)(?![^\W_])",
    re.IGNORECASE,
)
_HEADINGS = re.compile(
    "findings?|impressions?|comparison|history|indication|technique|procedure|exam(?:ination)?|report|conclusions?"
    "|recommendations?|addendum|information|views?|date|befund|beurteilung|technik|indikation|hallazgos|constatations"
    "|conclusione|reperti|achados",
    re.IGNORECASE,
)
"""What a dash behind a colon is no answer to: it begins a list."""

POSITIVE, NEGATIVE, DOUBTFUL = "positive", "negative", "equivocal"
_MEANS: dict[str, str] = {
    **dict.fromkeys(("plus", "is_plus", "plus_ve", "yes"), POSITIVE),
    **dict.fromkeys(("minus", "is_minus", "minus_ve", "no"), NEGATIVE),
    "doubt": DOUBTFUL,
    "none": "no",
}


def restore(text: str, kinds: Collection[str] = KINDS, counts: Counter[str] | None = None) -> str:
    """Return the text with its escapes decoded, without invisible characters and marks, and with signs as words.

    Args:
        text: A report as it was written, without markup.
        kinds: Those of KINDS that are restored.
        counts: Where each kind that the text held is counted, once a report.
    """
    for kind, present, step in _STEPS:
        if kind in kinds and present(text):
            restored = step(text)
            if counts is not None and restored != text:
                counts[kind] += 1
            text = restored
    return text


SAID = {
    ESCAPES: "reports with decoded escapes",
    INVISIBLE: "reports without their invisible characters",
    MARKS: "reports without their de-identification marks",
    SIGNS: "reports with signs as words",
}


def restorations(texts: Iterable[str]) -> dict[str, int]:
    """Count the texts in which ``restore`` changes something, by what it is; as a data set's summary says it."""
    counts = Counter[str]()
    for text in texts:
        restore(text, counts=counts)
    return {SAID[kind]: counts[kind] for kind in KINDS if counts[kind]}


def without_unseen(text: str) -> list[int]:
    """Return the indices of the characters that a person sees."""
    unseen = {index for run in _UNSEEN.finditer(text) for index in range(*run.span())}
    return [index for index in range(len(text)) if index not in unseen]


def mask_marks(text: str) -> str:
    """Return the text, as long as before, with an X in the place of each de-identification mark."""
    return _MARK.sub(lambda mark: "X".ljust(len(mark[0])), text)


def _decode_escapes(text: str) -> str:
    paths = [match.span() for match in _PATH.finditer(text)]
    escapes = [
        escape for escape in _ESCAPE.finditer(text) if not any(start <= escape.start() < end for start, end in paths)
    ]
    sure = any(not _WITHIN_WORD.fullmatch(text[max(0, escape.start() - 1) : escape.end() + 1]) for escape in escapes)
    starts = {escape.start() for escape in escapes if sure or _NEGATION.match(text, escape.end())}

    def decoded(escape: re.Match[str]) -> str:
        return _decode(escape) if escape.start() in starts else escape[0]

    text = _ESCAPE.sub(decoded, text)
    return _SURROGATES.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)


def _decode(escape: re.Match[str]) -> str:
    if escape["blank"]:
        return "\t" if escape["blank"] in ("t", "011") else "\n"
    if escape["line"]:
        return "\n"
    if escape["plain"]:
        return escape["plain"]
    if code := escape["four"] or escape["eight"]:
        return chr(int(code, 16)) if int(code, 16) < 0x110000 else escape[0]
    raw = bytes.fromhex("".join(re.findall(r"[x%=]([0-9A-Fa-f]{2})", escape[0])))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _drop_unseen(text: str) -> str:
    return _UNSEEN.sub("", text)


def _drop_marks(text: str) -> str:
    return _MARK.sub(" ", text)


def _write_signs(text: str) -> str:
    if _BARE_PLUS.search(text):
        text = _BARE_PLUS.sub(f" {POSITIVE}", _BARE_MINUS.sub(f" {NEGATIVE}", text))
    if _TICKED.search(text):
        text = _EMPTY.sub(f" {NEGATIVE} ", text)
    return _SIGN.sub(_in_words, text)


def _in_words(sign: re.Match[str]) -> str:
    (kind,) = (kind for kind in _MEANS if sign[kind])
    finding = sign["of"] or ""
    return sign[0] if _HEADINGS.fullmatch(finding) else f"{finding} {_MEANS[kind]} "


_STEPS: tuple[tuple[str, Callable[[str], object], Callable[[str], str]], ...] = (
    (ESCAPES, re.compile(r"\\|%[0C-Fc-f]|=[0C-F]").search, _decode_escapes),
    (INVISIBLE, re.compile(r"[^\t\n\x0b-\x0d\x1c-\x1e -~]").search, _drop_unseen),
    (MARKS, re.compile(r"[\[<{*#@█■]|[Xx]{2}").search, _drop_marks),
    (
        SIGNS,
        re.compile(r"[-+\[(:=\u00b1\u2205\u2610-\u2612\u2705\u2713-\u2718\u274c\u274e]").search,
        _write_signs,
    ),
)  # a cheap look first: most reports hold none
