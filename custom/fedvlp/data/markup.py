"""What systems write into reports beside their words: escapes of HL7, tags and entities of HTML, escapes of Excel."""

from __future__ import annotations

import html
import re

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
    text = _EXCEL.sub(_of_excel, _HL7.sub(_of_hl7, _TWICE.sub(_of_twice, text)))
    for _ in range(_ESCAPED):
        before = text
        text = _TAG.sub(lambda tag: "" if tag["inline"] else "\n", _HIDDEN.sub(" ", text))
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
        if text == before:
            break
    return text


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
