"""Report text as the towers see it, after the MGCA code base (Wang et al., 2022, https://arxiv.org/abs/2210.06044)."""

from __future__ import annotations

import html
import re
import unicodedata

from fedvlp.data.text_restoration import ESCAPES, INVISIBLE, MARKS, restore

# What systems write into reports beside their words: escapes of HL7, tags and entities of HTML, escapes of Excel.

_HL7 = re.compile(
    r"\\(?:\.(?P<layout>br|sp|sk|in|ti|fi|nf|ce)\s*[+-]?\d*|(?P<style>[HN])|(?P<mark>[FSTRE])"
    r"|X(?P<bytes>(?:[0-9A-Fa-f]{2})+)|[CMZ][0-9A-Fa-f]{2,})\\"
)
_HL7_MARKS = {"F": "|", "S": "^", "T": "&", "R": "~", "E": "\\"}
_ESCAPED = 5  # times at most: "&lt;br&gt;" is a tag that was escaped once
_EXCEL = re.compile(r"_x([0-9A-Fa-f]{4})_")  # a character that XML cannot hold; "_x000D_" is a carriage return
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{0,31});")
# from one begin to the next of its kind at most, so that many without an end are not each read to the end
_HIDDEN = re.compile(
    r"<!--(?:(?!<!--).)*?-->|<!doctype[^<>]*>|<\?xml[^<>]*>|<(style|script|head)\b[^<>]*>(?:(?!<\1\b).)*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
_INLINE = "b|i|u|s|em|strong|span|font|sup|sub|a|small|big|del|ins|code|content|o:p"
_BLOCK = (
    "p|br|hr|div|table|tbody|thead|tr|td|th|ul|ol|li|h[1-6]|pre|html|body|center|blockquote|dl|dt|dd|section|title|"
    "meta|img|text|paragraph|list|item|caption"
)
_ATTRIBUTES = r"(?:\s+[\w:-]+\s*=\s*(?:\"[^\"<]*\"|'[^'<]*'|[^\s\"'<>]+))*\s*/?>"
_TAG = re.compile(rf"</?(?:(?P<inline>{_INLINE})|{_BLOCK}){_ATTRIBUTES}", re.IGNORECASE)  # by name: "<5 mm" is none


# UTF-8 that was read as cp1252 and written as UTF-8 once more: "\u00c3\u00bc" for "\u00fc"
_CONTINUES = "[\x80-\xbf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]"
_TWICE = re.compile(f"[\u00c2-\u00c5]{_CONTINUES}|\u00e2{_CONTINUES}{{2}}")
_LOST = re.compile(r"[^\W\d_]\ufffd+(?!(?:s|t|d|m|re|ll|ve)\b)[^\W\d_]")  # within a word, but for an apostrophe


def lacks_letters(text: str) -> bool:
    """Whether a report was written where its letters had been lost: "gr\ufffd\ufffder"."""
    return _LOST.search(text) is not None


def is_rtf(text: str) -> bool:
    """Whether a report is in the Rich Text Format, which is no text to read words from."""
    return text.lstrip().startswith("{\\rtf")


def plain(text: str) -> str:
    """A report without markup: what breaks a line there is a line break, and escaped characters are themselves."""
    # HL7's escapes go first: "\\X0A\\" is one of theirs
    text = _EXCEL.sub(_of_excel, _HL7.sub(_of_hl7, _TWICE.sub(_of_twice, text)))
    for _ in range(_ESCAPED):
        before = text
        text = _TAG.sub(lambda tag: "" if tag["inline"] else "\n", _HIDDEN.sub(" ", text))
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
        if text == before:
            break
    return restore(text, (ESCAPES, INVISIBLE))


def _of_twice(letters: re.Match[str]) -> str:
    raw = bytes(ord(one) if ord(one) < 256 else one.encode("cp1252")[0] for one in letters[0])
    return raw.decode("utf-8", "ignore") or letters[0]


def _of_hl7(escape: re.Match[str]) -> str:
    if escape["layout"]:
        return "\n"
    if escape["bytes"]:
        raw = bytes.fromhex(escape["bytes"])
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw.decode("latin-1")
    return _HL7_MARKS.get(escape["mark"] or "", "")


def _of_excel(escape: re.Match[str]) -> str:
    letter = chr(int(escape[1], 16))
    return letter if letter.isprintable() else "\n"


CLEANED, AS_WRITTEN, PAPERS = "cleaned", "as written", "papers"
"""How reports are read: words in small Latin letters; all that is written; the words, without sentences of one."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_]+")  # Chinese and Japanese have no blanks between theirs
_SENTENCE_END = re.compile(r"(?<![0-9])\.|\.(?![0-9])")  # a full stop, but for that of "3.5"
# blanks behind a line break end at the next one, so that blank lines are not read from each of them to the last
_LIST_NUMBER = re.compile(r"(?:(^|;|:(?=\s)|\.(?=\s)|(?<![0-9])\.)\s*|([\r\n])[^\S\r\n]*)([0-9]{1,2})\.(?![0-9])")
_SIGNS = re.compile(r"([^\w\s]{30})[^\w\s]+")  # 30 marks upon a letter are what Unicode foresees (UAX 15)
_TOKEN = re.compile(r"[^\W_]+")  # "____" stands for what was taken out
_HEADING = re.compile(r"^[ \t]*([A-Z][A-Z0-9 \t/,&()-]*[A-Z)]):", re.MULTILINE)  # in capitals, first of its line
_BANNER = re.compile(
    r"^[ \t]*(?:(?:(?:FINAL|PRELIMINARY)[ \t]+)?(REPORT|ADDENDUM)[ \t]*$|[Aa]ddendum[ \t]*:)", re.MULTILINE
)  # a line that names a part of the document
_LETTERS = str.maketrans(
    {"ß": "ss", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "\u0131": "i", "ŋ": "ng"}
)  # that no accent makes of others
_MISSING = frozenset({"", "nan", "none", "null", "na", "n/a"})


def is_missing(text: str) -> bool:
    """Whether a cell of a table is empty, blank or a word for "nothing" ("nan", "none", "null", "n/a")."""
    return text.strip().lower() in _MISSING


def clean_report(text: str, min_words: int = 3, min_sentence_words: int = 1) -> str:
    """Lower-case ASCII words joined by spaces; "" when fewer than ``min_words`` remain.

    Sentences of fewer than ``min_sentence_words`` are dropped; the papers drop those of one word ("Cardiomegaly."), so
    that 2 is their rule. List numbers ("1.") are left out. Escapes, invisible characters, marks of de-identification
    and signs ("(+)") are restored first (``text_restoration``).
    Differs: "3.5" keeps its whole part (upstream "5"), accented letters keep their base letter ("pneumonía" is
    "pneumonia", upstream "pneumona"), and letters that have none are written out ("größe" is "grosse").
    """
    words: list[str] = []
    for sentence in _split(_composed(restore(text))):
        folded = (_to_ascii(token) for token in _TOKEN.findall(sentence.lower()))
        tokens = [token for token in folded if token]
        if len(tokens) >= min_sentence_words:
            words += tokens
    return " ".join(words) if len(words) >= min_words else ""


def read_report(text: str, how: str, min_words: int) -> str:
    """A report as ``how`` says (CLEANED, AS_WRITTEN, PAPERS); "" when fewer than ``min_words`` remain."""
    if how != AS_WRITTEN:
        return clean_report(text, min_words, 2 if how == PAPERS else 1)
    written = " ".join(_composed(restore(text, (ESCAPES, INVISIBLE, MARKS))).split())
    return written if len(_WORD.findall(written)) >= min_words else ""


def letters_lost(text: str) -> float:
    """The part of a text's letters, 0..1, that ``clean_report`` cannot write: those of other alphabets."""
    letters = [letter for letter in _composed(text).lower() if letter.isalpha()]
    return sum(not _to_ascii(letter) for letter in letters) / max(len(letters), 1)


def clean_phrase(text: str) -> str:
    """As ``clean_report``, of a phrase that somebody asks with."""
    return clean_report(text, 1)


def sentences(report: str) -> list[str]:
    """The sentences of a report as written, in order; a heading ("FINDINGS:") ends one and belongs to none."""
    return [stripped for piece in _split(_HEADING.sub(".", report)) if (stripped := piece.strip())]


def _composed(text: str) -> str:
    """Letters with their accents in one character. Marks are sorted in the square of their number: so of 30 at most."""
    return unicodedata.normalize("NFC", _SIGNS.sub(r"\1", text))


def _split(text: str) -> list[str]:
    """The text between full stops, without the numbers of lists.

    A number is a list's where a sentence could begin and it is 1 or the next one: "Fracture of rib 5." has none.
    """
    expected = 1

    def left_out(match: re.Match[str]) -> str:
        nonlocal expected
        number = int(match[3])
        if number not in (1, expected):
            return match[0]
        expected = number + 1
        return f"{match[1] or match[2] or ''}."

    return _SENTENCE_END.split(_LIST_NUMBER.sub(left_out, text))


def sections(report: str) -> dict[str, str]:
    """Heading -> text of each section. A heading is in capitals and begins a line ("FINDINGS:").

    So do lines that name a part of the document, as MIMIC's "FINAL ADDENDUM": its text is a section of its own.
    Text before the first heading and empty sections are left out. Sections of one name are joined. "FINDING", "FINAL
    IMPRESSION" and the like count as FINDINGS and IMPRESSION; a heading with both words counts as FINDINGS.
    """
    texts: dict[str, str] = {}
    marked = _BANNER.sub(lambda banner: f"{banner[1] or 'ADDENDUM'}:", report)
    _, *fields = _HEADING.split(marked)  # heading, text, heading, text, ...
    for heading, text in zip(fields[::2], fields[1::2], strict=True):
        name = heading
        if "FINDING" in heading:
            name = "FINDINGS"
        elif "IMPRESSION" in heading:
            name = "IMPRESSION"
        texts[name] = f"{texts.get(name, '')} {text.strip()}".strip()
    return {name: text for name, text in texts.items() if text}


def _to_ascii(token: str) -> str:
    """The token in small letters without accents; characters that have no ASCII form are left out."""
    if token.isascii():
        return token
    return unicodedata.normalize("NFKD", token.translate(_LETTERS)).encode("ascii", "ignore").decode("ascii")
