"""The one table every data source becomes: a cohort of image-text pairs, one row per image, pixels read on demand."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np

SPLITS = ("train", "val", "test")
PUBLIC = "public"
"""In place of a site: the record belongs to the public set, which the server and every site hold."""


WHOLE = ("label_names", "images", "fingerprint", "phi")
"""Fields of a cohort that belong to it as a whole; every other is a column, with one value for each row."""


class NoRecordsError(ValueError):
    """A site has too few records, or none; the message holds counts and names of sites alone."""


@dataclass(frozen=True, eq=False, repr=False)
class Cohort:
    """A columnar table of image-text pairs, one row per image. Errors never hold report text, paths or patient ids."""

    ids: tuple[str, ...]  # unique per row
    patients: tuple[str, ...]
    studies: tuple[str, ...]
    reports: tuple[str, ...]  # "" = no text
    labels: np.ndarray  # [N, L] float32: 1, 0, -1 uncertain, nan not mentioned
    label_names: tuple[str, ...]
    splits: np.ndarray  # [N] str: "train" | "val" | "test"
    sites: tuple[str, ...] | None  # natural site per row, None = to be partitioned
    images: Callable[[np.ndarray], np.ndarray]  # rows [n] int -> uint8 [n, S, S], grey
    fingerprint: str  # hash that changes whenever any pixel or report would
    imaged: np.ndarray | None = None  # [N] bool, False where a row has no image; None = every row has one
    report_from: tuple[str, ...] | None = None  # id of the row that a retrieved report comes from; "" = its own
    phi: Mapping[str, int] = field(default_factory=dict)  # reports by kind of identifier found in them (data/deid.py)

    def __post_init__(self) -> None:
        n = len(self.ids)
        for name in self.columns():
            column = getattr(self, name)
            if column is not None and name != "labels" and len(column) != n:
                raise ValueError(f"cohort: column {name} has {len(column)} rows, ids has {n}")
        if len(set(self.ids)) != n:
            raise ValueError(f"cohort: ids must be unique per row, {n - len(set(self.ids))} of {n} are repeated")
        self._check_labels()
        self._check_splits()

    def _check_labels(self) -> None:
        expected = (len(self.ids), len(self.label_names))
        if self.labels.shape != expected:
            raise ValueError(f"cohort: labels have shape {self.labels.shape}, expected {expected} (rows, label names)")
        if self.labels.dtype != np.float32:
            raise ValueError(f"cohort: labels are {self.labels.dtype}, expected float32")
        if len(set(self.label_names)) != len(self.label_names):
            raise ValueError("cohort: label names must be unique")
        strange = ~(np.isnan(self.labels) | np.isin(self.labels, (1, 0, -1)))
        if strange.any():
            raise ValueError(f"cohort: {int(strange.sum())} labels are not 1, 0, -1 (uncertain) or nan (blank)")

    def _check_splits(self) -> None:
        if not len(self):
            return
        strange = int((~np.isin(self.splits, SPLITS)).sum())
        if strange:
            raise ValueError(f"cohort: {strange} of {len(self)} rows are in no split of {', '.join(SPLITS)}")
        _, patient = np.unique(np.asarray(self.patients), return_inverse=True)  # [N]
        held = np.zeros((patient.max() + 1, len(SPLITS)), dtype=bool)
        for column, split in enumerate(SPLITS):
            held[patient[np.asarray(self.splits) == split], column] = True
        crossing = int((held.sum(axis=1) > 1).sum())
        if crossing:
            raise ValueError(
                f"cohort: {crossing} of {len(held)} patients are in more than one split; "
                "split by patient so that no patient is both trained on and tested on"
            )

    def __repr__(self) -> str:
        """Counts only: a log or a traceback that shows a cohort shows no patient."""
        sites = "unpartitioned" if self.sites is None else f"{len(set(self.sites))} sites"
        return f"Cohort({len(self)} rows, {len(set(self.patients))} patients, {sites}, {self.fingerprint[:12]})"

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, split: str, site: str | None = None) -> np.ndarray:
        """Ascending row numbers [n] int64 of one split, of one site or (``site`` None) of all."""
        if split not in SPLITS:
            raise ValueError(f"cohort: unknown split {split!r}; expected one of {', '.join(SPLITS)}")
        chosen = np.asarray(self.splits) == split
        if site is not None:
            if self.sites is None:
                raise ValueError(f"cohort: rows of {site!r} asked of a cohort without sites; partition it first")
            at = np.asarray(self.sites) == site
            if not at.any():
                raise ValueError(f"cohort: no row at site {site!r}; it has {', '.join(sorted(set(self.sites)))}")
            chosen &= at
        return np.flatnonzero(chosen)

    def with_sites(self, sites: Sequence[str]) -> Cohort:
        """The same rows, each now belonging to the named site."""
        return replace(self, sites=tuple(sites))

    def has_image(self) -> np.ndarray:
        """[N] bool: which rows have an image."""
        return np.ones(len(self), dtype=bool) if self.imaged is None else np.asarray(self.imaged)

    def has_report(self) -> np.ndarray:
        """[N] bool: which rows have a report."""
        return np.array([report != "" for report in self.reports], dtype=bool)

    def without(self, reports: np.ndarray, images: np.ndarray) -> Cohort:
        """The same rows; those marked in ``reports`` [N] lose their report, those in ``images`` [N] their image."""
        kept = tuple("" if lost else report for report, lost in zip(self.reports, reports, strict=True))
        mark = digest(self.fingerprint, np.packbits(reports).tobytes(), np.packbits(images).tobytes())
        return replace(self, reports=kept, imaged=self.has_image() & ~images, fingerprint=mark)

    def take(self, rows: np.ndarray) -> Cohort:
        """The chosen rows [n] as a cohort of their own; pixels still come from the same reader."""
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"cohort: rows must be in 0..{len(self) - 1}, got {rows.min()}..{rows.max()}")

        def picked(column: Any) -> Any:
            if column is None:
                return None
            return column[rows] if isinstance(column, np.ndarray) else tuple(column[row] for row in rows)

        columns = {name: picked(getattr(self, name)) for name in self.columns()}
        mark = digest(self.fingerprint, rows.astype("<i8").tobytes())
        return replace(self, **columns, images=Rows(self.images, rows), fingerprint=mark)

    @classmethod
    def columns(cls) -> list[str]:
        """The fields that hold one value for each row (or None)."""
        return [f.name for f in fields(cls) if f.name not in WHOLE]

    @staticmethod
    def concat(cohorts: Sequence[Cohort]) -> Cohort:
        """The rows of all, one cohort after the other; a label that a cohort does not know is blank in its rows.

        Sites are those of the cohorts, or None where one has none. Identifiers found in reports (``phi``) are added up:
        what is refused alone is refused together. Raises ValueError without a cohort; the images must have one size.
        """
        if not cohorts:
            raise ValueError("cohort: nothing to join; give at least one cohort")

        def chained(column: str) -> tuple[str, ...]:
            return tuple(chain.from_iterable(getattr(cohort, column) for cohort in cohorts))

        names, labels = _labels_together(cohorts)
        retrieved = [cohort.report_from or ("",) * len(cohort) for cohort in cohorts]
        return Cohort(
            ids=chained("ids"),
            patients=chained("patients"),
            studies=chained("studies"),
            reports=chained("reports"),
            labels=labels,
            label_names=names,
            splits=np.concatenate([np.asarray(cohort.splits) for cohort in cohorts]),
            sites=None if any(cohort.sites is None for cohort in cohorts) else chained("sites"),
            images=Readers(tuple(cohorts)),
            fingerprint=digest(*(cohort.fingerprint for cohort in cohorts)),
            imaged=np.concatenate([cohort.has_image() for cohort in cohorts]),
            report_from=tuple(chain.from_iterable(retrieved)) if any(map(any, retrieved)) else None,
            phi=dict(sum((Counter(cohort.phi) for cohort in cohorts), Counter())),
        )


def _labels_together(cohorts: Sequence[Cohort]) -> tuple[tuple[str, ...], np.ndarray]:
    """The label names of all cohorts, and the labels [N, L] of their rows."""
    names = tuple(dict.fromkeys(name for cohort in cohorts for name in cohort.label_names))
    labels = np.full((sum(map(len, cohorts)), len(names)), np.nan, dtype=np.float32)
    start = 0
    for cohort in cohorts:
        columns = [names.index(name) for name in cohort.label_names]
        labels[start : start + len(cohort), columns] = cohort.labels
        start += len(cohort)
    return names, labels


@dataclass(frozen=True, eq=False)
class Readers:
    """A reader of several cohorts' pixels, their rows one after the other."""

    cohorts: tuple[Cohort, ...]

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64)
        bounds = np.cumsum([0, *map(len, self.cohorts)])
        owner = np.searchsorted(bounds, rows, side="right") - 1
        found = {c: self.cohorts[c].images(rows[owner == c] - bounds[c]) for c in np.unique(owner).tolist()}
        sizes = sorted({images.shape[1:] for images in found.values()})
        if len(sizes) > 1:
            raise ValueError(f"cohort: the images of the joined cohorts are {sizes}; give all one image_size")
        images = np.empty((len(rows), *(sizes[0] if sizes else (0, 0))), dtype=np.uint8)
        for cohort, pixels in found.items():
            images[owner == cohort] = pixels
        return images


@dataclass(frozen=True, eq=False)
class Rows:
    """A reader of a subset's pixels: row i of the subset is row ``rows[i]`` of the reader below."""

    images: Callable[[np.ndarray], np.ndarray]
    rows: np.ndarray  # [n] int64

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return self.images(self.rows[np.asarray(rows, dtype=np.int64)])


def digest(*parts: str | bytes) -> str:
    """SHA-256 in hex over the parts, each framed by its length so that ("ab", "c") and ("a", "bc") differ."""
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        sha.update(len(raw).to_bytes(8, "little"))
        sha.update(raw)
    return sha.hexdigest()
