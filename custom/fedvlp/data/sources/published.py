"""What published collections share: reading a table, and making its rows a cohort with a summary of what was used."""

from __future__ import annotations

import csv
import gzip
import io
import math
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedvlp.data.images import is_beside
from fedvlp.data.sources.listed import Images, Listed, Listing
from fedvlp.data.table_files import parts_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Images", "Listing"]

LONGEST_CELL = 2**26
"""Characters of a table's cell, at most: outlines and long reports exceed the 131,072 of Python's default."""

DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, tarfile.TarError, csv.Error, UnicodeDecodeError)
"""What reading a damaged file raises."""


def read_rows(
    name: str, path: str | Path, columns: Collection[str], optional: Collection[str] = ()
) -> Iterator[dict[str, str]]:
    """The rows of a CSV (``.gz`` and ``.zip`` too) as column -> cell, of ``columns`` and the ``optional`` ones alone.

    An optional column that the table lacks is "" in every row. Spaces around the names of columns, which some
    collections have, are left out.
    Raises ValueError for a missing file, missing ``columns``, and a table that is damaged or was cut off. Errors never
    hold the file's content.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{name} source: the table (path) is not a file")
    with undamaged(name, file), _long_cells(), _text(name, file) as lines:
        reader = csv.DictReader(lines, strict=True)  # or else a lone quote would swallow all rows up to the next one
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        missing = [column for column in columns if column not in reader.fieldnames]
        if missing:
            raise ValueError(
                f"{name} source: the table lacks {len(missing)} of {len(columns)} columns: {', '.join(missing)}; "
                "give the table as it was published"
            )
        wanted = {*columns, *optional} & {*reader.fieldnames}
        row: dict[str, str | None] = {}
        for row in reader:
            if any(row[column] is None for column in wanted):
                raise _cut_off(name, file, reader.line_num)
            yield {column: row.get(column) or "" for column in (*columns, *optional)}
        if None in row.values():
            raise _cut_off(name, file, reader.line_num)


@contextmanager
def _long_cells() -> Iterator[None]:
    """Lets cells be as long as ``LONGEST_CELL``. The limit is one number for the whole process."""
    limit = csv.field_size_limit(LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _cut_off(name: str, file: Path, line: int) -> ValueError:
    return ValueError(
        f"{name} source: {file.name} is damaged: its line {line} ends before its last column; download it again"
    )


@contextmanager
def undamaged(name: str, file: Path) -> Iterator[None]:
    """Whoever reads the published ``file`` within raises ValueError that names it and a remedy, but no path or content.

    ``name`` is that of the source.
    """
    try:
        yield
    except DAMAGE as error:
        kind = "not UTF-8" if isinstance(error, UnicodeDecodeError) else type(error).__name__
        raise ValueError(f"{name} source: {file.name} is damaged ({kind}); download it again") from None
    except OSError as error:
        raise ValueError(
            f"{name} source: {file.name} cannot be read ({error.strerror or type(error).__name__}); see that its disk "
            "or share is there and that this account may read it"
        ) from None


def numbers(name: str, rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> np.ndarray:
    """The ``columns`` of ``rows`` as float32 [N, L], nan where a cell is empty.

    Raises ValueError that counts the rows with another cell, and repeats none.
    """
    values = np.full((len(rows), len(columns)), np.nan, dtype=np.float32)
    strange = 0
    for index, row in enumerate(rows):
        try:
            values[index] = [float(row[column] or "nan") for column in columns]
        except ValueError:
            strange += 1
    if strange:
        raise ValueError(
            f"{name} source: {strange} of {len(rows)} rows have a label that is not a number; give the table as it was "
            "published"
        )
    return values


def first_of(root: Path, names: Sequence[str]) -> Path | None:
    """The first of ``names`` that is a file or a folder in ``root``, packed (``.gz``, ``.zip``) or not; else None."""
    candidates = (root / f"{name}{suffix}" for name in names for suffix in ("", ".gz", ".zip"))
    return next((path for path in candidates if path.exists()), None)


def require_items(source: str, root: Path, items: Collection[str]) -> None:
    """Raises ValueError that lists those of the published ``items`` that are not in ``root``, packed or not.

    An item with " or " in it has several published names, of which one is enough.
    """
    missing = [item for item in items if first_of(root, item.split(" or ")) is None]
    if missing:
        raise ValueError(
            f"{source} source: the root lacks {len(missing)} of {len(items)} published items: {', '.join(missing)}; "
            "give the folder as it was published, unpacked"
        )


def refuse_absent(source: str, missing: int, total: int, most: float, what: str = "images are not under root") -> None:
    """Raises ValueError where more than ``most`` (0..1) of the files of a collection, in all ``total``, are missing."""
    if total and missing == total:
        raise ValueError(
            f"{source} source: {missing} of {total} {what}: none is there. Give the folder that they were unpacked "
            "into (root=FOLDER), or unpack them"
        )
    if missing > most * total:
        share = math.ceil(1000 * missing / total) / 1000
        raise ValueError(
            f"{source} source: {missing} of {total} {what}; unpack them all, or set max_missing={share:g} to "
            "take the part of the collection that is there"
        )


@contextmanager
def _text(name: str, file: Path) -> Iterator[IO[str]]:
    """Opens a table as text; of a zip archive, its first CSV. Raises ValueError for an archive that has none.

    What a Mac adds to an archive is no CSV, whatever its name.
    """
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            members = [Path(member) for member in archive.namelist()]
            tables = [m for m in members if m.suffix.lower() == ".csv" and not any(map(is_beside, parts_of(str(m))))]
            if not tables:
                raise ValueError(
                    f"{name} source: there is no .csv in {file.name}; give the archive as it was published"
                )
            with archive.open(tables[0].as_posix()) as raw:
                yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
    else:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig", newline="") as lines:
            yield lines


@dataclass(frozen=True, kw_only=True)
class Published(Listed):
    """Base class of the sources of published collections: a source implements ``listing``."""

    known: ClassVar[str] = ""  # name of the source, as in ``SOURCES``; "": its module's
    needs: ClassVar[tuple[str, ...]] = ()  # what else a published folder has to hold; "a or b" is either
    published_as: ClassVar[Mapping[str, str]] = {}  # field -> item of the folder, if there; ``path`` is ``table``

    max_missing: float = 0.0  # of the images, 0..1: how many may not be under root, as where a part was downloaded

    @classmethod
    def at(cls, root: Path, **settings: Any) -> Self:
        """The source of a collection that lies in the folder ``root`` as it was published, with its images.

        ``settings`` outrank what is found there. Raises ValueError that lists the items that ``root`` lacks.
        """
        return cls(**{**cls.layout(root), **settings})

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """Field -> path of each of the collection's files and folders in ``root``. Raises ValueError as ``at``."""
        items = {"path": cls.table, **cls.published_as}
        require_items(cls.source_name(), root, [item for item in (items["path"], *cls.needs) if item != "."])
        paths = {name: first_of(root, item.split(" or ")) for name, item in items.items()}
        return {"root": str(root), **{name: str(path) for name, path in paths.items() if path}}

    @classmethod
    def source_name(cls) -> str:
        """What messages call the source: its name in ``SOURCES``."""
        return cls.known or cls.__module__.rpartition(".")[2]

    def _present(self) -> Listing:
        """The listing of the rows whose images are there. Raises ValueError for more without than ``max_missing``."""
        listing = self.listing()
        if listing.files is None:
            return listing
        there = {file: file.is_file() for file in dict.fromkeys(listing.files) if file is not None}
        refuse_absent(listing.source, sum(not one for one in there.values()), len(there), self.max_missing)
        rows = [row for row, file in enumerate(listing.files) if file is None or there[file]]
        if len(rows) == len(listing.files):
            return listing
        left_out = {**listing.left_out, "image not under root": len(listing.files) - len(rows)}
        return replace(listing.of_rows(rows), left_out=left_out)


@dataclass(frozen=True, kw_only=True)
class Photographs(Published):
    """Base class of collections of photographs."""

    colour: bool = False  # three channels (red, green, blue) in place of grey; the model's in_channels is then 3

    @property
    def in_colour(self) -> bool:
        return self.colour
