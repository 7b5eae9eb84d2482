"""What the file of a table is, by its first bytes: packed, parquet and JSON are made CSV, the rest is named."""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib.util
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedvlp.data.images import is_beside

_SAVE = "save it as CSV (UTF-8)"
_EXPORT = "export the table as CSV (UTF-8)"
NAMED = (
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Excel workbook", _SAVE),
    (b"SQLite format 3\0", "an SQLite database", _EXPORT),
    (b"%PDF", "a PDF", _EXPORT),
    (b"{\\rtf", "a text in RTF", _EXPORT),
    (b"ARROW1", "an Arrow or Feather file", _EXPORT),
    (b"ORC", "an ORC file", _EXPORT),
    (b"\x89HDF", "an HDF5 file", _EXPORT),
    (b"\x93NUMPY", "a NumPy array", _EXPORT),
    (b"\x80\x04\x95", "a pickle of Python", _EXPORT),
    (b"\x80\x05\x95", "a pickle of Python", _EXPORT),
    (b"$FL", "an SPSS file", _SAVE),
    (b"<stata_dta>", "a Stata file", _SAVE),
    (b"RDX", "data of R", _EXPORT),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it, and give the table in it"),
    (b"Rar!", "a RAR archive", "unpack it, and give the table in it"),
    (b"\x28\xb5\x2f\xfd", "packed by zstd", "unpack it, and give the table in it"),
    (b"\x89PNG", "an image", "give the CSV that lists the images (path)"),
    (b"\xff\xd8\xff", "an image", "give the CSV that lists the images (path)"),
    (b"II*\0", "an image", "give the CSV that lists the images (path)"),
    (b"MM\0*", "an image", "give the CSV that lists the images (path)"),
)
"""First bytes of a file -> what it is, and what to do."""

PACKED: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\0": lzma.decompress,
}
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError, RuntimeError)


def as_csv(raw: bytes) -> tuple[bytes, bool]:
    """The bytes of a CSV, and whether it was made here: then it is UTF-8 with commas.

    Raises ValueError, which says what the file is and what to do, for one that no table is read from.
    """
    for begin, unpack in PACKED.items():
        if raw.startswith(begin):
            try:
                return as_csv(unpack(raw))
            except _DAMAGE:
                raise _refused("damaged, or was cut off", "pack or copy it again") from None
    if raw.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return as_csv(_of_zip(raw))
    if raw.startswith(b"PAR1"):
        return _written(*_of_parquet(raw)), True
    if named := next((one for one in NAMED if raw.startswith(one[0])), None):
        raise _refused(*named[1:])
    if raw[128:132] == b"DICM":
        raise _refused("an image", "give the CSV that lists the images (path)")
    if raw[257:262] == b"ustar":
        raise _refused("a tar archive", "unpack it, and give the table in it")
    begin = raw[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    if begin.lower().startswith((b"<?xml", b"<!doctype", b"<html", b"<table", b"<meta", b"<head", b"<style")):
        raise _refused("XML or a web page, whatever its suffix", f"{_SAVE}; a spreadsheet opens some of them")
    if begin.startswith((b"{", b"[{")) or (begin.startswith(b"[") and begin[1:].lstrip().startswith(b"{")):
        return _written(*_of_json(raw)), True
    return raw, False


def _refused(what: str, remedy: str) -> ValueError:
    return ValueError(f"table source: the table (path) is {what}, and no CSV; {remedy}")


def _of_zip(raw: bytes) -> bytes:
    """The one table in an archive. Raises ValueError for a workbook, which is an archive too, and for none or several.

    What a Mac adds to an archive is no table.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            names = archive.namelist()
            if any(name.startswith("xl/") for name in names):
                raise _refused("an Excel workbook", _SAVE)
            if "mimetype" in names and "content.xml" in names:
                raise _refused("an OpenDocument spreadsheet or text", _SAVE)
            tables = [name for name in names if Path(name).suffix.lower() in (".csv", ".tsv", ".txt")]
            tables = [name for name in tables if name[-1] != "/" and not any(map(is_beside, parts_of(name)))]
            if len(tables) != 1:
                raise _refused(f"an archive with {len(tables)} tables", "unpack it, and give the table in it")
            return archive.read(tables[0])
    except _DAMAGE:
        raise _refused("a damaged archive, or one with a password", "unpack it, and give the table in it") from None


def parts_of(name: str) -> list[Path]:
    """The folders of a file in an archive, and the file."""
    return [Path(step) for step in Path(name).parts]


def _of_parquet(raw: bytes) -> tuple[list[str], Iterable[Sequence[Any]]]:
    """Columns and rows."""
    if importlib.util.find_spec("pyarrow") is None:
        raise _refused("parquet", f"pip install 'fedvlp[parquet]' reads it; or {_EXPORT}")
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        table = read_table(io.BytesIO(raw))
    except (ArrowException, OSError):
        raise _refused("damaged parquet", "export it again") from None
    return table.column_names, zip(*(column.to_pylist() for column in table.columns), strict=True)


def _of_json(raw: bytes) -> tuple[list[str], Iterable[Sequence[Any]]]:
    """Columns and rows of a list of objects, or of one object a line."""
    try:
        text = raw.decode("utf-8-sig")
        if text.lstrip().startswith("["):
            records = json.loads(text)
        else:
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise _refused("JSON that cannot be read", f"write one object a line, in UTF-8, or {_EXPORT}") from None
    if not all(isinstance(record, dict) for record in records):
        raise _refused("JSON with other than objects", f"write one object a line, or {_EXPORT}")
    columns = list(dict.fromkeys(name for record in records for name in record))
    return columns, ([record.get(name) for name in columns] for record in records)


def _written(columns: list[str], rows: Iterable[Sequence[Any]]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue().encode("utf-8", "replace")
