"""The one table every data source becomes: a cohort of image-text pairs, one row per image, pixels read on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

SPLITS = ("train", "val", "test")
PUBLIC = "public"
"""In place of a site: the record belongs to the public set, which the server and every site hold."""


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
        columns = {"patients": self.patients, "studies": self.studies, "reports": self.reports, "splits": self.splits}
        if self.sites is not None:
            columns["sites"] = self.sites
        if self.imaged is not None:
            columns["imaged"] = tuple(self.imaged)
        if self.report_from is not None:
            columns["report_from"] = self.report_from
        for name, column in columns.items():
            if len(column) != n:
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

        def pick(column: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(column[row] for row in rows)

        return Cohort(
            ids=pick(self.ids),
            patients=pick(self.patients),
            studies=pick(self.studies),
            reports=pick(self.reports),
            labels=self.labels[rows],
            label_names=self.label_names,
            splits=np.asarray(self.splits)[rows],
            sites=None if self.sites is None else pick(self.sites),
            images=Rows(self.images, rows),
            imaged=None if self.imaged is None else np.asarray(self.imaged)[rows],
            report_from=None if self.report_from is None else pick(self.report_from),
            phi=self.phi,
            fingerprint=digest(self.fingerprint, rows.astype("<i8").tobytes()),
        )


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
