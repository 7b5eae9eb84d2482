"""What published collections share: reading a table, and from its rows a cohort and a summary of how it came about."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

import numpy as np

from fedvlp.data.cache import ImageCache
from fedvlp.data.cache_format import SERIAL, Building
from fedvlp.data.cohort import Cohort, Rows, digest
from fedvlp.data.images import films
from fedvlp.data.sources.table import draw_splits

log = logging.getLogger(__name__)


def read_rows(name: str, path: str | Path, columns: Collection[str]) -> Iterator[dict[str, str]]:
    """The rows of a CSV (``.gz``, ``.zip`` too) that must have ``columns``. Errors never hold the file's content."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{name} source: the table (path) is not a file")
    with _text(file) as lines:
        reader = csv.DictReader(lines)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{name} source: the table lacks {len(missing)} of {len(columns)} columns: {', '.join(missing)}; "
                "give the table as it was published"
            )
        yield from reader


@contextmanager
def _text(file: Path) -> Iterator[IO[str]]:
    """A table's text: of the file, or of the one in the archive."""
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive, archive.open(archive.namelist()[0]) as raw:
            yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
    else:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig", newline="") as lines:
            yield lines


@dataclass(frozen=True, eq=False)
class Listing:
    """The rows of a collection before an image is read; ``files`` is None where there are no images."""

    source: str
    keys: Sequence[str]  # what names a row in the collection
    patients: Sequence[str]
    studies: Sequence[str]
    reports: Sequence[str]  # "" = no text
    labels: np.ndarray  # [N, L] float32
    names: tuple[str, ...]
    splits: Sequence[str]  # "" = to be drawn by patient
    files: Sequence[Path] | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)  # rows of the collection, by why they are not here
    phi: Mapping[str, int] = field(default_factory=dict)  # reports by kind of identifier found in their raw text

    def hashed(self, kind: str, values: Sequence[str]) -> tuple[str, ...]:
        """Names of this collection as hashes."""
        return tuple(digest(self.source, kind, value)[:16] for value in values)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published collection: what its sources have in common. A source says how its rows are listed."""

    table: ClassVar[str] = ""  # where ``path`` is, below root, as the collection is published

    image_size: int = 256  # side of the decoded square, pixels
    val_fraction: float = 0.1  # of the patients, where the collection has no validation split
    test_fraction: float = 0.2  # of the patients, where the collection has no test split
    seed: int = 0  # of the drawn splits
    cache: str | None = None  # folder for decoded images; None: decoded in memory by every process

    def listing(self) -> Listing:
        """The usable rows. Raises ValueError naming the tables, columns or number of files that are missing."""
        raise NotImplementedError

    def build(self) -> Cohort:
        """Reads tables and images. Raises ValueError if something of the collection is missing."""
        return self.prepare()[0]

    def prepare(self, most: int | None = None, building: Building = SERIAL) -> tuple[Cohort, dict[str, int]]:
        """The cohort and the summary of how it came about; with ``most``, of the first usable rows only, as a check.

        Names are hashed, open splits drawn by patient, unreadable images left out and counted.
        """
        found = self.listing()
        if not found.keys:
            raise ValueError(f"{found.source} source: no usable record; look at path and root")
        rows = np.arange(len(found.keys))[:most]
        ids = found.hashed("record", found.keys)
        images = self._images(found, ids, len(rows), building)
        if images is not None:
            rows = np.array([row for row in rows.tolist() if row not in images.skipped], dtype=np.int64)
        if not len(rows):
            raise ValueError(f"{found.source} source: none of {len(ids)} images can be read")
        cohort = self._cohort(found, ids, rows, images)
        summary = {"rows": len(ids) + sum(found.left_out.values()), "used": len(cohort)}
        summary |= {"patients": len(set(cohort.patients))} | {f"skipped: {why}": n for why, n in found.left_out.items()}
        if images is not None:
            summary |= {f"skipped: {why}": n for why, n in sorted(Counter(images.skipped.values()).items())}
        log.info("%s source: %s", found.source, ", ".join(f"{name} {count}" for name, count in summary.items()))
        return cohort, summary

    def _images(self, found: Listing, ids: Sequence[str], most: int, building: Building) -> ImageCache | None:
        if found.files is None:
            return None
        if missing := sum(not file.is_file() for file in found.files):
            raise ValueError(f"{found.source} source: {missing} of {len(found.files)} images are not under root")
        return films(found.source, ids[:most], found.files[:most], self.image_size, self.cache, building)

    def _cohort(self, found: Listing, ids: Sequence[str], rows: np.ndarray, images: ImageCache | None) -> Cohort:
        def pick(column: Sequence[str]) -> tuple[str, ...]:
            return tuple(column[row] for row in rows)

        ids, reports, labels = pick(ids), pick(found.reports), found.labels[rows]
        patients = found.hashed("patient", pick(found.patients))
        given = pick(found.splits)
        val, test = (0.0 if n in given else f for n, f in (("val", self.val_fraction), ("test", self.test_fraction)))
        drawn = draw_splits(patients, None, val, test, self.seed).tolist()
        splits = np.array([own or draw for own, draw in zip(given, drawn, strict=True)])
        content = [digest(*column) for column in (ids, patients, reports, found.names, splits.tolist())]
        checksums = b"" if images is None else images.checksums[rows].astype("<u4").tobytes()
        return Cohort(
            ids=ids,
            patients=patients,
            studies=found.hashed("study", pick(found.studies)),
            reports=reports,
            labels=labels,
            label_names=found.names,
            splits=splits,
            sites=None,
            images=NoImages(self.image_size) if images is None else Rows(images, rows),
            fingerprint=digest(*content, labels.astype("<f4").tobytes(), checksums),
            imaged=np.full(len(ids), images is not None),
            phi=found.phi,
        )


@dataclass(frozen=True)
class NoImages:
    """Reader of records without images: black squares, which nobody is shown (``Cohort.imaged`` is False)."""

    size: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return np.zeros((len(rows), self.size, self.size), dtype=np.uint8)
