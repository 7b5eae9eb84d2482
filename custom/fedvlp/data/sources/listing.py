"""What the published label tables share: reading a table (gzip too), and a cohort from its rows."""

from __future__ import annotations

import csv
import gzip
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedvlp.data.cache import cached_images
from fedvlp.data.record import Cohort, digest
from fedvlp.data.sources.table import draw_splits
from fedvlp.data.transforms import DECODING, UnreadableImageError, decode, load

log = logging.getLogger(__name__)


def read_rows(name: str, path: str, columns: Collection[str]) -> Iterator[dict[str, str]]:
    """The rows of a CSV (``.gz`` too) that must have ``columns``. Errors name the source, never the file's content."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{name} source: the table (path) is not a file")
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{name} source: the table lacks {len(missing)} of {len(columns)} columns: {', '.join(missing)}; "
                "give the table as it was published"
            )
        yield from reader


@dataclass(frozen=True)
class Drawn:
    """How records are read and split where the collection does not say."""

    image_size: int
    val_fraction: float
    test_fraction: float
    seed: int
    cache: str | None = None


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

    def take(self, rows: Sequence[int]) -> Listing:
        """Some of the rows."""
        columns = {n: [getattr(self, n)[r] for r in rows] for n in ("keys", "patients", "studies", "reports", "splits")}
        files = None if self.files is None else [self.files[row] for row in rows]
        return replace(self, **columns, labels=self.labels[list(rows)], files=files)  # type: ignore[arg-type]

    def cohort(self, drawn: Drawn) -> Cohort:
        """The cohort: names hashed, open splits drawn by patient, unreadable images left out and counted."""
        if not self.keys:
            raise ValueError(f"{self.source} source: no usable record; look at path and root")
        ids = [self._hashed("record", key) for key in self.keys]
        images, checksums, unreadable = self._images(ids, drawn)
        if unreadable:
            log.warning("%s source: %d of %d images cannot be read", self.source, len(unreadable), len(ids))
            readable = [row for row in range(len(ids)) if row not in unreadable]
            return self.take(readable).cohort(drawn)
        patients = tuple(self._hashed("patient", patient) for patient in self.patients)
        found = draw_splits(patients, None, drawn.val_fraction, drawn.test_fraction, drawn.seed)
        splits = np.array([given or draw for given, draw in zip(self.splits, found.tolist(), strict=True)])
        content = [digest(*column) for column in (ids, patients, self.reports, self.names, splits.tolist())]
        return Cohort(
            ids=tuple(ids),
            patients=patients,
            studies=tuple(self._hashed("study", study) for study in self.studies),
            reports=tuple(self.reports),
            labels=self.labels,
            label_names=self.names,
            splits=splits,
            sites=None,
            images=images,
            fingerprint=digest(*content, self.labels.astype("<f4").tobytes(), checksums),
            imaged=np.full(len(ids), self.files is not None),
        )

    def _images(self, ids: list[str], drawn: Drawn) -> tuple[Callable[[np.ndarray], np.ndarray], bytes, set[int]]:
        """The reader, a checksum of all pixels, and the rows that cannot be read."""
        size, files = drawn.image_size, self.files
        if files is None:
            return NoImages(size), b"", set()
        if missing := sum(not file.is_file() for file in files):
            raise ValueError(f"{self.source} source: {missing} of {len(files)} images are not under root")

        def build() -> Iterator[np.ndarray | str]:
            transform = decode(size)
            for file in files:
                try:
                    yield load(file, transform)
                except UnreadableImageError as error:
                    yield error.reason

        stats = [file.stat() for file in files] if drawn.cache else []
        state = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in zip(ids, stats, strict=False)]
        key = f"{self.source}-" + digest(DECODING, str(size), *state)[:32]
        images = cached_images(Path(drawn.cache) if drawn.cache else None, key, build, len(ids), size)
        return images, images.checksums.astype("<u4").tobytes(), set(images.skipped)

    def _hashed(self, kind: str, value: str) -> str:
        return digest(self.source, kind, value)[:16]


@dataclass(frozen=True)
class NoImages:
    """Reader of records without images: black squares, which nobody is shown (``Cohort.imaged`` is False)."""

    size: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return np.zeros((len(rows), self.size, self.size), dtype=np.uint8)
