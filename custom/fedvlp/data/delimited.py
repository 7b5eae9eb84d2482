"""Tables as hospitals export them: encoding, delimiter and columns are detected, or asked for; no guesses.

Errors hold numbers of lines and names of settings, and nothing of the file.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
"""What separates the cells of a table -> its name."""

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

OPTION = (
    "set data.encoding to what it is (utf-8, cp1252, latin-1, utf-16; cp1250 Central European, cp1251 Cyrillic, cp1253 "
    "Greek, cp1254 Turkish, gbk Chinese, cp932 Japanese, ...)"
)
WESTERN = tuple(
    map(
        frozenset,
        ("äöüß", "àâæçéèêëîïôœùûü", "áéíñóúü", "ãâáàçéêíóôõúü", "àèéìîòù", "àçèéíïòóúü", "æøåé", "äåöé", "éèëïöü"),
    )
)
"""Letters beyond a to z of German, French, Spanish, Portuguese, Italian, Catalan, Danish, Swedish and Dutch.

What is Czech, Russian, Greek or Chinese makes letters of several of these in cp1252; of Icelandic, what is Turkish.
"""
FOREIGN = 0.05
"""Part of such letters that may be of another language, as in a name."""
_SIGNS = "ªºµ"  # letters by name alone
_SIGN_IN_WORD = re.compile(r"(?<=[^\W\d_])(?:(?![\u2013\u2019\u00ad\u00b7])[^\x00-\x7f\w\s]|[¹²³ªº¼½¾])(?=[^\W\d_])")
SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n")  # what Excel writes above a table, and reads
SHOWN = 5
"""Numbers of lines that an error names."""

MOST_ABOVE = 10
"""Lines that a title above the header has, at most."""
TITLE_CELLS = 2
"""Cells with anything in them that a line of a title has, at most: "Created", "2024-01-01"."""

LINE_BREAK = re.compile(r"\r\n|\r|\n")
RUN = re.compile(r"[^\W_]+")  # of letters and digits


@dataclass(frozen=True)
class DelimitedTable:
    """The lines of a table, and how they were read."""

    columns: list[str]  # those that were asked for under these names, whatever their case in the file
    lines: list[list[str]]  # cells below the header; empty rows are left out
    said: str  # how it was read; "": as a comma-separated UTF-8 with the very names


def read(raw: bytes, wanted: Collection[str], encoding: str = "", delimiter: str = "") -> DelimitedTable:
    """The table of a file's bytes. ``wanted``: names of columns to look for; "" for what is detected.

    Raises ValueError for bytes that are no text of one encoding, for a delimiter that cannot be detected or is not one
    character, for what ``rows`` refuses, and for a column that is there twice.
    """
    text, known = decoded(raw, encoding)
    text = text.replace("\0", "")  # as a database pads cells; Python 3.10 reads no CSV with it
    if above := SEPARATOR_LINE.match(text):
        text, delimiter = text[above.end() :], delimiter or above[1]
    text, titles = _below_title(text, wanted, delimiter)
    mark = delimiter or _delimiter(text, wanted)
    if len(mark) != 1:
        raise ValueError(f"table source: data.delimiter is {mark!r}; expected one character")
    lines = rows(io.StringIO(text, newline=""), "table source", mark, first=1 + bool(above) + titles)
    lines = _within(lines)
    columns = [visible(name) for name in lines[0]] if lines else []
    if repeated := _repeated(columns, wanted):
        raise ValueError(
            f"table source: column {', '.join(map(str, repeated[:SHOWN]))} of the table has the name of one before it; "
            "rename it in the first line, or take it out"
        )
    named = [_as_wanted(name, columns, wanted) for name in columns]
    how = [f"read as {DELIMITERS.get(mark, 'specially')}-separated {known}"] if (mark, known) != (",", "utf-8") else []
    how += [f"without {titles} {'line' if titles == 1 else 'lines'} above its header"] if titles else []
    changed = sorted(new for new, old in zip(named, columns, strict=True) if new != old)
    how += [f"with the columns {', '.join(changed)} in another case"] if changed else []
    return DelimitedTable(named, lines[1:], " ".join(how))


def _below_title(text: str, wanted: Collection[str], delimiter: str) -> tuple[str, int]:
    """The text from its header on, and how many lines of a title there are above it.

    The header is the first line with two of the ``wanted`` columns, or with the only one; what is above it is a title
    where each line has at most two cells that hold anything, and fewer than the header.
    """
    names = {name.casefold() for name in wanted}
    lines = io.StringIO(text, newline="")
    first = [lines.readline() for _ in range(MOST_ABOVE + 1)]
    for mark in [delimiter] if len(delimiter) == 1 else DELIMITERS:
        cells = [[visible(cell) for cell in _cells(line, mark)] for line in first]
        has = [len(names & set(map(str.casefold, line))) >= min(2, len(names)) for line in cells]
        if not names or True not in has:
            continue
        number = has.index(True)
        held = [len(list(filter(None, line))) for line in cells[: number + 1]]
        if all(count <= TITLE_CELLS and count < held[-1] for count in held[:-1]):
            return text[sum(map(len, first[:number])) :], number
    return text, 0


def _cells(line: str, mark: str) -> list[str]:
    """The cells of a line alone; none where it begins one that is longer than csv reads."""
    try:
        return next(csv.reader([line], delimiter=mark), [])
    except csv.Error:
        return []


def visible(name: str) -> str:
    """The name of a column as a person reads it: without byte order marks, blanks of no width and other such signs."""
    seen = "".join(letter for letter in name if unicodedata.category(letter) not in ("Cf", "Cc") or letter.isspace())
    return " ".join(seen.split())


def _repeated(columns: list[str], wanted: Collection[str]) -> list[int]:
    """The numbers, from 1, of the columns with the name of a ``wanted`` one before them, whatever its case.

    Nothing is read of the others, such as an index that was written twice.
    """
    named = {name.casefold() for name in wanted}
    first: dict[str, int] = {}
    repeated = [number for number, name in enumerate(columns, start=1) if first.setdefault(name, number) != number]
    return [number for number in repeated if columns[number - 1].casefold() in named]


def _within(lines: list[list[str]]) -> list[list[str]]:
    """The header and the rows that hold anything, without the empty columns at their right, as Excel leaves both."""
    if not lines:
        return []
    header, *below = lines
    held = [line for line in below if any(map(str.strip, line))]
    named = len(header)
    while named and not header[named - 1].strip():
        named -= 1
    full = len(header)
    width = min(full, max([named, *(named + _filled(line[named:]) for line in held)]))
    return [line[:width] if len(line) == full else line for line in (header, *held)]


def _filled(cells: list[str]) -> int:
    """How many of the cells there are up to the last that holds anything."""
    return next((number for number in range(len(cells), 0, -1) if cells[number - 1].strip()), 0)


def decoded(raw: bytes, encoding: str = "") -> tuple[str, str]:
    """The text of a file's bytes and the name of its encoding; "" tells UTF-8, UTF-16 and cp1252 apart.

    It is cp1252 only where that makes words. What has no byte of 0x80 to 0x9F is the same text in cp1252 and latin-1.
    Raises ValueError for an unknown encoding, bytes that it does not have, and where several encodings are in one file
    or none of these fits.
    """
    if encoding:
        return _strict(raw, encoding), encoding
    for mark, name in BYTE_ORDER_MARKS:
        if raw.startswith(mark):
            return _strict(raw, name), name.removesuffix("-sig")
    if silent := _utf_16(raw):
        return _strict(raw, silent), "utf-16"
    try:
        return raw.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        pass
    lines = raw.splitlines()
    strange = [number for number, line in enumerate(lines, start=1) if not _is(line, "utf-8")]
    if any(not line.isascii() and _is(line, "utf-8") for line in lines):
        raise ValueError(
            f"table source: the file has two encodings: {_numbers(strange)} no UTF-8, and others with accents are. "
            f"Export it again, or {OPTION}"
        )
    if not _is(raw, "cp1252"):
        raise ValueError(
            f"table source: {_numbers(strange)} neither UTF-8 nor cp1252, so the encoding cannot be detected; {OPTION}"
        )
    text = raw.decode("cp1252")
    if no_words := _no_words(text):
        raise ValueError(
            f"table source: {_numbers(no_words)} no UTF-8, and no words of one language in cp1252, so the encoding "
            f"cannot be detected; {OPTION}"
        )
    return text, "cp1252"


def _no_words(text: str) -> list[int]:
    """The numbers of the lines with signs in words, and with letters beyond the alphabet that has most; [] for words.

    charset-normalizer would not do: it takes one page in three for another, and says of none that it cannot tell.
    """
    letters = Counter(text.lower())
    for letter in [one for one in letters if not one.isalpha() or one.isascii() or one in _SIGNS]:
        del letters[letter]
    alphabet = max(WESTERN, key=lambda one: sum(letters[letter] for letter in one))
    strange = {letter for letter in letters if letter not in alphabet}
    if sum(letters[letter] for letter in strange) <= FOREIGN * letters.total():
        strange = set()
    lines = enumerate(LINE_BREAK.split(text), start=1)
    return [number for number, line in lines if strange & {*line.lower()} or _SIGN_IN_WORD.search(line)]


def _utf_16(raw: bytes) -> str:
    """The encoding of UTF-16 that does not say so, in which most second bytes are zero; "" for all else."""
    even, odd = raw[0::2].count(0), raw[1::2].count(0)
    if max(even, odd) <= len(raw) // 4:
        return ""
    return "utf-16-le" if odd > even else "utf-16-be"


def _strict(raw: bytes, encoding: str) -> str:
    try:
        return raw.decode("utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding)
    except LookupError:
        raise ValueError(f"table source: encoding {encoding!r} is none that Python knows; {OPTION}") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"table source: line {line} is no {encoding.removesuffix('-sig')}; export the table again, or {OPTION}"
        ) from None


def _is(raw: bytes, encoding: str) -> bool:
    try:
        raw.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _numbers(lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:SHOWN]))
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"{'line' if len(lines) == 1 else 'lines'} {shown}{more} {'is' if len(lines) == 1 else 'are'}"


def _delimiter(text: str, wanted: Collection[str]) -> str:
    """The delimiter whose header has most of the ``wanted`` columns, then most columns.

    Without any of the ``wanted``, two that make as many columns are a comma: no column is taken from such a table.
    """
    names = {name.casefold() for name in wanted}
    first = io.StringIO(text, newline="").readline(csv.field_size_limit())  # at most what a cell may have
    score = {}
    for mark in DELIMITERS:
        cells = [visible(cell).casefold() for cell in next(csv.reader([first], delimiter=mark), [])]
        score[mark] = (len(names & set(cells)), len(cells))
    best = max(score.values())
    marks = [mark for mark, reached in score.items() if reached == best]
    if best[1] == 1 or (best[0] == 0 and len(marks) > 1):
        return ","
    if len(marks) > 1:
        several = " or ".join(DELIMITERS[mark] for mark in marks)
        raise ValueError(f"table source: the delimiter may be {several}; set data.delimiter to the right one")
    return marks[0]


def rows(lines: Iterable[str], source: str, delimiter: str = ",", first: int = 1) -> list[list[str]]:
    """Cells of all rows of a CSV; an empty line has none. ``first``: number of its first line in the file.

    Raises ValueError, with the name of the ``source`` and numbers of lines, where a quotation mark opens no cell or
    closes none, and where a cell seems to hold other rows, as between two lone quotation marks.
    """
    table: list[list[str]] = []
    starts: list[int] = []  # line in which each row begins
    start = first
    limit = csv.field_size_limit(2**31 - 1)  # a report may exceed the default of 131,072 characters
    try:
        reader = csv.reader((line.replace("\0", "") for line in lines), delimiter=delimiter, strict=True)
        for row in reader:
            table.append(row)
            starts.append(start)
            start = first + reader.line_num
    except csv.Error:
        raise ValueError(
            f"{source}: the row that begins in line {start} is not CSV: a quotation mark in it opens no cell or closes "
            "none. Write it twice, in a cell that is itself in quotation marks, or export the table again"
        ) from None
    finally:
        csv.field_size_limit(limit)
    if swallowed := [starts[index] for index in _with_rows_within(table, delimiter)]:
        raise ValueError(
            f"{source}: a cell seems to hold several rows, as if a quotation mark were not closed: "
            f"{_numbers(swallowed)} where such rows begin. Write a quotation mark twice, in a cell that is itself in "
            "quotation marks; if the cell is right, export the table with another delimiter, such as the tab"
        )
    return table


def _with_rows_within(table: list[list[str]], delimiter: str) -> list[int]:
    """Indices of the rows with a cell in which one row seems to end and the next to begin.

    There, the cells before and after a line break look as those of their columns do in the rest of the table.
    """
    width = len(table[0]) if table else 0
    looks: dict[int, set[str]] = {}  # column -> how its cells look

    def fits(column: int, cell: str) -> bool:
        if column not in looks:
            looks[column] = {_look(row[column]) for row in table[1:] if len(row) == width}
        return not cell or _look(cell) in looks[column]

    def joins(column: int, cell: str) -> bool:
        pieces = [piece for piece in LINE_BREAK.split(cell) if piece]
        for ended, begun in pairwise(pieces):
            if ended.count(delimiter) < width - 1 - column or begun.count(delimiter) < column:
                continue
            cells = dict(enumerate(begun.split(delimiter, column)[:column]))
            cells |= dict(enumerate(ended.rsplit(delimiter, width - 1 - column)[1:], start=column + 1))
            if any(cells.values()) and all(fits(*item) for item in cells.items()):
                return True
        return False

    return [
        index
        for index, row in enumerate(table[1:], start=1)
        if any(("\n" in cell or "\r" in cell) and joins(column, cell) for column, cell in enumerate(row[:width]))
    ]


def _look(cell: str) -> str:
    """A cell as others of its kind look: "p10" as "p9", "10.png" as "9.png", a text of several words as any other."""
    if len(cell.split()) > 1:
        return "words"
    return RUN.sub(lambda run: "0" if any(map(str.isdigit, run[0])) else "a", cell)


def _as_wanted(name: str, columns: list[str], wanted: Collection[str]) -> str:
    """The wanted name that a column has but for its case, where no column has it exactly; else its own.

    Raises ValueError where several columns are the wanted one but for their case.
    """
    match = next((one for one in wanted if one.casefold() == name.casefold() and one not in columns), None)
    if match is None:
        return name
    alike = [column for column in columns if column.casefold() == match.casefold()]
    if len(alike) > 1:
        raise ValueError(
            f"table source: {len(alike)} columns are {match!r} but for their case; name the one to take, as it is "
            "written in the first line"
        )
    return match
