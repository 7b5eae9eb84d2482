"""What published collections share: reading a table, and making its rows a cohort with a summary of what was used."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import math
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from fedvlp.data.burned_in import HEADER
from fedvlp.data.cache_build import SERIAL, Building
from fedvlp.data.cohort import Cohort, HeldQuestions, Question, Rows, digest
from fedvlp.data.images import films, unsearched
from fedvlp.data.masks import Box, BoxMasks
from fedvlp.data.screening import DataSource, Screened
from fedvlp.data.sources.table import draw_splits
from fedvlp.data.subgroups import table_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

log = logging.getLogger(__name__)

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
    if missing > most * total:
        share = math.ceil(1000 * missing / total) / 1000
        raise ValueError(
            f"{source} source: {missing} of {total} {what}; unpack them all, or set max_missing={share:g} to "
            "take the part of the collection that is there"
        )


def by_patient(patients: Sequence[str], splits: Sequence[str]) -> tuple[list[str], int]:
    """``splits`` with every patient in one of them, and how many rows that moved.

    Where a collection has a patient in several splits, all rows of the patient go to the one that is held out most:
    test, then val, then train. "" (to be drawn) gives way to any of them.
    """
    rank = {"": 0, "train": 1, "val": 2, "test": 3}
    held: dict[str, str] = {}
    for patient, split in zip(patients, splits, strict=True):
        held[patient] = max(split, held.get(patient, ""), key=rank.__getitem__)
    settled = [held[patient] for patient in patients]
    return settled, sum(one != other for one, other in zip(settled, splits, strict=True))


@contextmanager
def _text(name: str, file: Path) -> Iterator[IO[str]]:
    """Opens a table as text; of a zip archive, its first CSV. Raises ValueError for an archive that has none.

    What a Mac adds to an archive is no CSV, whatever its name.
    """
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            members = [Path(member) for member in archive.namelist()]
            tables = [
                m for m in members if m.suffix.lower() == ".csv" and m.parts[0] != "__MACOSX" and m.name[0] != "."
            ]
            if not tables:
                raise ValueError(
                    f"{name} source: there is no .csv in {file.name}; give the archive as it was published"
                )
            with archive.open(tables[0].as_posix()) as raw:
                yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
    else:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig", newline="") as lines:
            yield lines


@dataclass(frozen=True, eq=False)
class Listing:
    """The N usable rows of a collection before any image is read."""

    source: str  # name of the source, for messages and hashes
    keys: Sequence[str]  # the collection's own name of each row, unique
    patients: Sequence[str]
    studies: Sequence[str]
    reports: Sequence[str]  # "" where a row has no text
    labels: np.ndarray  # [N, L] float32, as in a cohort
    names: tuple[str, ...]  # of the L labels
    splits: Sequence[str]  # "train", "val", "test"; "" is drawn by patient
    files: Sequence[Path] | None = None  # image of each row; None: no image is read
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason -> rows of the collection that are not listed
    unsure: Mapping[str, int] = field(default_factory=dict)  # what nothing is known of -> listed rows
    phi: Mapping[str, int] = field(default_factory=dict)  # kind of identifier -> raw reports that hold one
    questions: Sequence[tuple[Question, ...]] | None = None  # about each row's image; None: the collection has none
    boxes: Mapping[str, Sequence[tuple[Box, ...]]] | None = None  # structure -> outlines of each row's; None: no masks
    subgroups: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # sex, age, ... -> that of each row; "" unknown
    people: str = ""  # the source whose records and patients these are, where it is another

    def of_rows(self, rows: Sequence[int]) -> Listing:
        """The listing of these ``rows`` alone."""

        def pick(column: Sequence[T]) -> list[T]:
            return [column[row] for row in rows]

        columns = ("keys", "patients", "studies", "reports", "splits", "files", "questions")
        given: dict[str, Any] = {name: pick(column) for name in columns if (column := getattr(self, name)) is not None}
        if self.boxes is not None:
            given["boxes"] = {name: pick(column) for name, column in self.boxes.items()}
        given["subgroups"] = {name: pick(column) for name, column in self.subgroups.items()}
        return replace(self, labels=self.labels[list(rows)], **given)

    def hashed(self, kind: str, values: Sequence[str]) -> tuple[str, ...]:
        """The values as hashes of 16 hex digits, different for each collection and ``kind``."""
        return tuple(digest(self.people or self.source, kind, value)[:16] for value in values)


class Images(Protocol):
    """Reader of the N images of a listing."""

    @property
    def skipped(self) -> dict[int, str]:
        """Row -> reason, for the rows that have no readable image."""
        ...

    @property
    def checksums(self) -> np.ndarray:
        """A checksum of each row's pixels, [N] uint32."""
        ...

    @property
    def stored(self) -> Sequence[str]:
        """How each row's file stores its image, "" where that is not known."""
        ...

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S], in colour [n, S, S, 3], of ``rows`` [n]."""
        ...


@dataclass(frozen=True, eq=False)
class Repeated:
    """Reader of N rows of which row i has the image ``owner[i]`` of another reader."""

    images: Images
    owner: np.ndarray  # [N] int64

    @property
    def skipped(self) -> dict[int, str]:
        """Row -> reason, for the rows that have no readable image."""
        unread = self.images.skipped
        return {row: unread[index] for row, index in enumerate(self.owner.tolist()) if index in unread}

    @property
    def checksums(self) -> np.ndarray:
        """CRC-32 of each row's pixels, [N] uint32."""
        return self.images.checksums[self.owner]

    @property
    def stored(self) -> Sequence[str]:
        """How each row's file stores its image."""
        of_images = self.images.stored
        return [of_images[index] for index in self.owner.tolist()]

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S] or [n, S, S, 3] of ``rows`` [n]."""
        return self.images(self.owner[np.asarray(rows, dtype=np.int64)])


@dataclass(frozen=True, kw_only=True)
class Published(DataSource):
    """Base class of the sources of published collections: a source implements ``listing``."""

    known: ClassVar[str] = ""  # name of the source, as in ``SOURCES``; "": its module's
    table: ClassVar[str] = ""  # usual value of ``path``, relative to root, as the collection is published
    needs: ClassVar[tuple[str, ...]] = ()  # what else a published folder has to hold; "a or b" is either
    published_as: ClassVar[Mapping[str, str]] = {}  # field -> item of the folder, if there; ``path`` is ``table``

    image_size: int = 256  # side of the decoded square, pixels
    val_fraction: float = 0.1  # of the patients, 0..1, where the collection has no validation split
    test_fraction: float = 0.2  # of the patients, 0..1, where the collection has no test split
    seed: int = 0  # of the drawn splits
    cache: str | None = None  # folder for decoded images and for tokens; None: made in memory by every process
    burned_in: str = HEADER  # text in images: search | header | accept; what is published has been looked at
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

    def listing(self) -> Listing:
        """The usable rows. Raises ValueError that names missing tables or columns, or counts missing files."""
        raise NotImplementedError

    def _present(self) -> Listing:
        """The listing of the rows whose images are there. Raises ValueError for more without than ``max_missing``."""
        listing = self.listing()
        if listing.files is None:
            return listing
        there = {file: file.is_file() for file in dict.fromkeys(listing.files)}
        refuse_absent(listing.source, sum(not one for one in there.values()), len(there), self.max_missing)
        rows = [row for row, file in enumerate(listing.files) if there[file]]
        if len(rows) == len(listing.files):
            return listing
        left_out = {**listing.left_out, "image not under root": len(listing.files) - len(rows)}
        return replace(listing.of_rows(rows), left_out=left_out)

    def build(self) -> Cohort:
        """Reads tables and images. Raises ValueError if something of the collection is missing."""
        return self.prepare()[0]

    def prepare(self, most: int | None = None, building: Building = SERIAL) -> tuple[Cohort, dict[str, int]]:
        """The cohort, and a summary: what is counted -> number of rows. ``most`` takes the first usable rows only.

        Ids, patients and studies are hashed; splits that are not given are drawn by patient; rows with unreadable
        images are left out and counted. Raises ValueError as ``listing`` does, and if no row is usable.
        """
        return self.screen(most, building).prepare()

    def undecoded(self) -> Cohort:
        """The records without their images, as for counts. Raises ValueError as ``listing`` does."""
        return self._prepare(replace(self.listing(), files=None), None, SERIAL, {})[0]

    def screen(self, most: int | None = None, building: Building = SERIAL) -> Screened:
        """The reports, searched, before any image is decoded. Raises ValueError as ``prepare`` does."""
        listing = self._present()
        if not listing.keys:
            raise ValueError(f"{listing.source} source: no usable record; look at path and root")
        skipped: dict[str, list[str]] = {}
        decode = partial(self._prepare, listing, most, building, skipped)
        return Screened(listing.phi, len(listing.keys), decode, skipped)

    def _prepare(
        self, listing: Listing, most: int | None, building: Building, skipped: dict[str, list[str]]
    ) -> tuple[Cohort, dict[str, int]]:
        """``prepare`` of what is listed; ``skipped`` takes the names of the rows whose images cannot be read."""
        rows = np.arange(len(listing.keys))[:most]
        ids = listing.hashed("record", listing.keys)
        images = self._images(listing, ids, len(rows), building)
        if images is not None:
            unreadable = images.skipped
            rows = np.array([row for row in rows.tolist() if row not in unreadable], dtype=np.int64)
            for row, reason in unreadable.items():
                skipped.setdefault(reason, []).append(listing.keys[row])
        if not len(rows):
            raise ValueError(f"{listing.source} source: none of {len(ids)} images can be read")
        cohort = self._cohort(listing, ids, rows, images)
        summary = {"rows": len(ids) + sum(listing.left_out.values()), "used": len(cohort)}
        summary["patients"] = len(set(cohort.patients))
        if moved := by_patient(listing.patients, listing.splits)[1]:
            summary["moved to the split of their patient"] = moved
        summary |= {f"skipped: {reason}": count for reason, count in listing.left_out.items()}
        summary |= listing.unsure
        if images is not None:
            summary |= {f"skipped: {reason}": len(names) for reason, names in sorted(skipped.items())}
            if self.burned_in != HEADER:  # which goes without saying
                summary |= unsearched(self.burned_in, len(rows), listing.source)
        log.info("%s source: %s", listing.source, ", ".join(f"{name} {count}" for name, count in summary.items()))
        return cohort, summary

    def _images(self, listing: Listing, ids: Sequence[str], most: int, building: Building) -> Images | None:
        """The reader of the first ``most`` images; None for a collection without.

        A file that several rows have is decoded and kept once.
        """
        if listing.files is None:
            return None
        files = list(dict.fromkeys(listing.files[:most]))
        number = {file: index for index, file in enumerate(files)}
        first: dict[int, str] = {}  # number of a file -> id of the first row that has it
        owner = np.array([number[file] for file in listing.files[:most]], dtype=np.int64)
        for name, index in zip(ids, owner.tolist(), strict=False):
            first.setdefault(index, name)
        given = (self.image_size, self.cache, building, self.burned_in, self.in_colour)
        images = films(listing.source, [first[index] for index in range(len(files))], files, *given)
        return images if len(files) == len(owner) else Repeated(images, owner)

    def _cohort(self, listing: Listing, ids: Sequence[str], rows: np.ndarray, images: Images | None) -> Cohort:
        """The cohort of the chosen rows [n] of a listing."""

        def pick(column: Sequence[T]) -> tuple[T, ...]:
            return tuple(column[row] for row in rows)

        ids, reports, labels = pick(ids), pick(listing.reports), listing.labels[rows]
        patients = listing.hashed("patient", pick(listing.patients))
        given = pick(by_patient(listing.patients, listing.splits)[0])
        val = 0.0 if "val" in given else self.val_fraction
        test = 0.0 if "test" in given else self.test_fraction
        drawn = draw_splits(patients, None, val, test, self.seed).tolist()
        splits = np.array([published or draw for published, draw in zip(given, drawn, strict=True)])
        content = [digest(*column) for column in (ids, patients, reports, listing.names, splits.tolist())]
        asked = None if listing.questions is None else pick(listing.questions)
        boxes = None if listing.boxes is None else {name: pick(of_rows) for name, of_rows in listing.boxes.items()}
        content += [] if asked is None else [digest(*map(_contents, chain.from_iterable(asked)))]
        subgroups, subgroup_names = table_of({name: pick(given) for name, given in listing.subgroups.items()})
        checksums = b"" if images is None else images.checksums[rows].astype("<u4").tobytes()
        return Cohort(
            ids=ids,
            patients=patients,
            studies=listing.hashed("study", pick(listing.studies)),
            reports=reports,
            labels=labels,
            label_names=listing.names,
            splits=splits,
            sites=None,
            images=NoImages(self.image_size) if images is None else Rows(images, rows),
            fingerprint=digest(*content, labels.astype("<f4").tobytes(), checksums),
            imaged=np.full(len(ids), images is not None),
            phi=dict(listing.phi),
            masks=None if boxes is None else BoxMasks(boxes, self.image_size),
            questions=None if asked is None else HeldQuestions(asked),
            channels=3 if images is not None and self.in_colour else 1,
            subgroups=subgroups,
            subgroup_names=subgroup_names,
            stored=None if images is None else pick(images.stored),
            files=None if listing.files is None else pick(listing.files),
        )


@dataclass(frozen=True, kw_only=True)
class Photographs(Published):
    """Base class of collections of photographs."""

    colour: bool = False  # three channels (red, green, blue) in place of grey; the model's in_channels is then 3

    @property
    def in_colour(self) -> bool:
        return self.colour


def _contents(question: Question) -> str:
    """A hash that changes whenever the question or an answer does."""
    return digest(question.text, question.kind, question.common, *question.answers)


@dataclass(frozen=True)
class NoImages:
    """Reader for a cohort without images: black squares, which no model sees because ``Cohort.imaged`` is False."""

    size: int  # pixels

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Zeros, uint8 [n, size, size], for ``rows`` [n]."""
        return np.zeros((len(rows), self.size, self.size), dtype=np.uint8)
