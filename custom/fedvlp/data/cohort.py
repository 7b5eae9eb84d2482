"""The one table that every data source becomes: a cohort of image-text pairs, one row per image.

Pixels are not in the table. They are read on demand through ``Cohort.images``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fedvlp.core.site_error import SiteError
from fedvlp.data.radiograph import ImageAccessError, UnreadableImageError, read_radiograph, shape_of_file

# Questions about images with what people answered: what an evaluation of visual question answering reads.
#
# They are no column of a cohort: ``Cohort.questions`` reads those of the rows that are asked for, as masks are read.


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one image. Raises ValueError without an answer."""

    text: str  # as it was asked
    answers: tuple[str, ...]  # one of each person who was asked; a single one is the truth
    common: str  # the most common of them, as it was published
    kind: str  # figures are also given for each kind, e.g. "yes/no"

    def __post_init__(self) -> None:
        if not self.answers:
            raise ValueError("question: no answer; expected at least one. Leave out what nobody answered")


Questions = Callable[[np.ndarray], list[tuple[Question, ...]]]
"""Rows [n] int to the questions about the image of each row; () for an image that nothing is asked about."""


@dataclass(frozen=True, eq=False)
class HeldQuestions:
    """Reader of questions that are in memory."""

    of_rows: Sequence[tuple[Question, ...]]  # [N]

    def __call__(self, rows: np.ndarray) -> list[tuple[Question, ...]]:
        """The questions of each of the ``rows`` [n]."""
        return [self.of_rows[row] for row in rows.tolist()]


T = TypeVar("T")

SPLITS = ("train", "val", "test")
PUBLIC = "public"
"""Stands in the column ``sites`` for a record of the public set, which the server and every site hold."""

Sentences = Callable[[str], "list[tuple[str, np.ndarray]]"]
"""A report to its sentences, each with labels [L] float32 of its own, in the order of ``label_names``."""

WHOLE = (
    "label_names",
    "subgroup_names",
    "images",
    "fingerprint",
    "phi",
    "private",
    "masks",
    "questions",
    "sentences",
    "channels",
)
"""Fields that describe a cohort as a whole. Every other field is a column, with one value for each row."""


class NoRecordsError(SiteError, ValueError):
    """A site has too few records, or none. The message holds only counts and names of sites."""


@dataclass(frozen=True, eq=False, repr=False)
class Cohort:
    """A columnar table of N image-text pairs, one row per image.

    Raises ValueError where a column has another length than ``ids``, ids repeat, labels are not float32 [N, L] in
    {1, 0, -1, nan}, or a patient is in more than one split. Errors hold counts only: no report text, path or patient.
    """

    ids: tuple[str, ...]  # unique per row
    patients: tuple[str, ...]  # a patient's rows are all in one split
    studies: tuple[str, ...]  # rows of one study share their report
    reports: tuple[str, ...]  # "" where a row has no text
    labels: np.ndarray  # [N, L] float32: 1 present, 0 absent, -1 uncertain, nan not mentioned
    label_names: tuple[str, ...]  # L names, each once
    splits: np.ndarray  # [N] str: "train" | "val" | "test"
    sites: tuple[str, ...] | None  # site of each row; None where rows are still to be dealt to sites
    images: Callable[[np.ndarray], np.ndarray]  # rows [n] int -> uint8 [n, S, S], grey, or as ``channels`` says
    fingerprint: str  # hash that changes whenever any pixel or report would
    imaged: np.ndarray | None = None  # [N] bool, False where a row has no image; None = every row has one
    report_from: tuple[tuple[str, ...], ...] | None = (
        None  # ids of the rows of retrieved reports; () where it is its own
    )
    more_reports: tuple[tuple[str, ...], ...] | None = None  # retrieved beside that in ``reports``; () where none were
    phi: Mapping[str, int] = field(default_factory=dict)  # kind of identifier -> reports that hold one (data/deid.py)
    private: bool = False  # whether the ids are of a hospital's own records: see data/record_ids.py
    masks: Callable[[np.ndarray], dict[str, np.ndarray]] | None = (
        None  # rows [n] int -> by structure, bool [n, S, S] on the images' pixels; only evaluations read them
    )
    questions: Questions | None = None  # of rows [n], those about each image; only evaluations read them
    sentences: Sentences | None = None  # labels of single sentences; None where the data set has none
    channels: int = 1  # of the images: 1 is grey; 3 is red, green and blue, uint8 [n, S, S, 3]
    subgroups: np.ndarray | None = None  # [N, G] str: sex, age, ... of each row, "" unknown; only evaluations read them
    subgroup_names: tuple[str, ...] = ()  # G names, each once
    stored: tuple[str, ...] | None = None  # how each row's file stores its image ("PNG, 8 bits, grey"), "" not known
    files: tuple[Path | None, ...] | None = None  # of each row's image, on this machine; only its owner's eyes see them

    def __post_init__(self) -> None:
        n = len(self.ids)
        for name in self.columns():
            column = getattr(self, name)
            if column is not None and name != "labels" and len(column) != n:
                raise ValueError(f"cohort: column {name} has {len(column)} rows, ids has {n}")
        if len(set(self.ids)) != n:
            raise ValueError(f"cohort: ids must be unique per row, {n - len(set(self.ids))} of {n} are repeated")
        self._check_labels()
        self._check_subgroups()
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

    def _check_subgroups(self) -> None:
        shape = () if self.subgroups is None else self.subgroups.shape
        expected = (len(self.ids), len(self.subgroup_names)) if self.subgroup_names else ()
        if shape != expected or len(set(self.subgroup_names)) != len(self.subgroup_names):
            raise ValueError(
                f"cohort: subgroups have shape {shape}, expected {expected} (rows, names); their names must be unique"
            )

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
        """Ascending row numbers [n] int64 of one split, of one site or (``site`` None) of all sites.

        Raises ValueError for an unknown split, an unknown site, or a cohort that has no sites yet.
        """
        if split not in SPLITS:
            raise ValueError(f"cohort: unknown split {split!r}; expected one of {', '.join(SPLITS)}")
        chosen = np.asarray(self.splits) == split
        if site is not None:
            if self.sites is None:
                raise ValueError(
                    f"cohort: rows of site {site!r} asked for, but the cohort has no sites; partition it first"
                )
            at_site = np.asarray(self.sites) == site
            if not at_site.any():
                raise ValueError(f"cohort: no row at site {site!r}; sites are {', '.join(sorted(set(self.sites)))}")
            chosen &= at_site
        return np.flatnonzero(chosen)

    def subgroup(self, name: str) -> np.ndarray:
        """[N] str: the subgroup of each row by ``name``; "" where it is not known, or the cohort has no such name."""
        if self.subgroups is None or name not in self.subgroup_names:
            return np.full(len(self), "")
        return self.subgroups[:, self.subgroup_names.index(name)]

    def with_sites(self, sites: Sequence[str]) -> Cohort:
        """The same rows, each at its site of ``sites`` (N names)."""
        return replace(self, sites=tuple(sites))

    def named_by(self, owner: str) -> Cohort:
        """The same rows, whose ids, patients and studies are those of an ``owner``: no other owner has any of them."""

        def named(values: Sequence[str]) -> tuple[str, ...]:
            return tuple(value and digest(owner, value)[:16] for value in values)

        return replace(
            self,
            ids=named(self.ids),
            patients=named(self.patients),
            studies=named(self.studies),
            report_from=None if self.report_from is None else tuple(map(named, self.report_from)),
        )

    def has_image(self) -> np.ndarray:
        """[N] bool: which rows have an image."""
        return np.ones(len(self), dtype=bool) if self.imaged is None else np.asarray(self.imaged)

    def original(self, row: int, longest: int) -> np.ndarray:
        """The image of a row as its file has it, uint8 [H, W] or [H, W, 3], the longer side at most ``longest`` pixels.

        As decoded for training, where the file is not known or cannot be read any more.
        """
        file = self.files[row] if self.files else None
        if file is not None:
            with suppress(UnreadableImageError, ImageAccessError):
                longest = min(longest, max(shape_of_file(file)))
                whole = read_radiograph(file, longest, burned_in=True, colour=self.channels == 3)
                return whole.round().astype(np.uint8)
        return np.asarray(self.images(np.array([row]))[0])

    def has_report(self) -> np.ndarray:
        """[N] bool: which rows have a report."""
        return np.array([report != "" for report in self.reports], dtype=bool)

    def without(self, reports: np.ndarray, images: np.ndarray) -> Cohort:
        """The same rows, without their report where ``reports`` [N] bool is True, without image where ``images`` is."""
        remaining = tuple("" if lost else report for report, lost in zip(self.reports, reports, strict=True))
        mark = digest(self.fingerprint, np.packbits(reports).tobytes(), np.packbits(images).tobytes())
        return replace(self, reports=remaining, imaged=self.has_image() & ~images, fingerprint=mark)

    def take(self, rows: np.ndarray) -> Cohort:
        """The chosen ``rows`` [n] as a cohort of their own, whose pixels still come from the same reader.

        Raises IndexError for a row outside of 0..N-1.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"cohort: rows must be in 0..{len(self) - 1}, got {rows.min()}..{rows.max()}")

        def picked(column: Any) -> Any:
            if column is None:
                return None
            if isinstance(column, np.ndarray):
                return column[rows]
            return tuple(column[row] for row in rows)

        columns = {name: picked(getattr(self, name)) for name in self.columns()}
        mark = digest(self.fingerprint, rows.astype("<i8").tobytes())
        masks = None if self.masks is None else Rows(self.masks, rows)
        questions = None if self.questions is None else Rows(self.questions, rows)
        images = Rows(self.images, rows)
        return replace(self, **columns, images=images, fingerprint=mark, masks=masks, questions=questions)

    @classmethod
    def columns(cls) -> list[str]:
        """The fields that hold one value for each row (or None)."""
        return [f.name for f in fields(cls) if f.name not in WHOLE]

    @staticmethod
    def concat(cohorts: Sequence[Cohort]) -> Cohort:
        """The rows of all cohorts, one cohort after the other.

        A label that a cohort does not have is nan in its rows, a subgroup "". Masks and questions are left out, and
        single sentences have no labels any more. Sites are None if any cohort has none. The counts of identifiers in
        reports (``phi``) are summed, so a cohort that is refused alone is refused when joined. Beside images in colour,
        grey ones have three equal channels. Raises ValueError without a cohort. Images of different sizes are refused
        when they are read.
        """
        if not cohorts:
            raise ValueError("cohort: nothing to join; give at least one cohort")

        def chained(column: str) -> tuple[str, ...]:
            return tuple(chain.from_iterable(getattr(cohort, column) for cohort in cohorts))

        names, labels = _joined_labels(cohorts)
        subgroup_names, subgroups = _joined_subgroups(cohorts)
        identifiers = sum((Counter(cohort.phi) for cohort in cohorts), Counter())
        retrieved, more = (
            tuple(chain.from_iterable(getattr(cohort, name) or ((),) * len(cohort) for cohort in cohorts))
            for name in ("report_from", "more_reports")
        )
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
            report_from=retrieved if any(retrieved) else None,
            more_reports=more if any(more) else None,
            phi=dict(identifiers),
            private=any(cohort.private for cohort in cohorts),
            channels=max(cohort.channels for cohort in cohorts),
            subgroups=subgroups,
            subgroup_names=subgroup_names,
            stored=tuple(chain.from_iterable(cohort.stored or ("",) * len(cohort) for cohort in cohorts)),
            files=tuple(chain.from_iterable(cohort.files or (None,) * len(cohort) for cohort in cohorts)),
        )


def _joined_labels(cohorts: Sequence[Cohort]) -> tuple[tuple[str, ...], np.ndarray]:
    """The label names of all cohorts, each once, and the labels [N, L] float32 of their rows."""
    names = tuple(dict.fromkeys(name for cohort in cohorts for name in cohort.label_names))
    labels = np.full((sum(map(len, cohorts)), len(names)), np.nan, dtype=np.float32)
    start = 0
    for cohort in cohorts:
        columns = [names.index(name) for name in cohort.label_names]
        labels[start : start + len(cohort), columns] = cohort.labels
        start += len(cohort)
    return names, labels


def _joined_subgroups(cohorts: Sequence[Cohort]) -> tuple[tuple[str, ...], np.ndarray | None]:
    """The names of all cohorts' subgroups, each once, and the values [N, G] of their rows; None without a name."""
    names = tuple(dict.fromkeys(name for cohort in cohorts for name in cohort.subgroup_names))
    if not names:
        return (), None
    return names, np.concatenate([np.array([cohort.subgroup(name) for name in names]).T for cohort in cohorts])


@dataclass(frozen=True, eq=False)
class Readers:
    """Reads the pixels of several cohorts, whose rows follow each other."""

    cohorts: tuple[Cohort, ...]

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S], or [n, S, S, 3] where a cohort is in colour, of ``rows`` [n].

        Raises ValueError where the cohorts' images have different sizes.
        """
        rows = np.asarray(rows, dtype=np.int64)
        bounds = np.cumsum([0, *map(len, self.cohorts)])
        owner = np.searchsorted(bounds, rows, side="right") - 1  # [n], index of the cohort of each row
        pixels = {c: self.cohorts[c].images(rows[owner == c] - bounds[c]) for c in np.unique(owner).tolist()}
        sizes = sorted({images.shape[1:3] for images in pixels.values()})
        if len(sizes) > 1:
            raise ValueError(f"cohort: the images of the joined cohorts are {sizes}; give all one image_size")
        colour = (3,) * any(cohort.channels == 3 for cohort in self.cohorts)
        images = np.empty((len(rows), *(sizes[0] if sizes else (0, 0)), *colour), dtype=np.uint8)
        for cohort, own in pixels.items():
            images[owner == cohort] = own[..., None] if colour and own.ndim == 3 else own
        return images


@dataclass(frozen=True, eq=False)
class Rows(Generic[T]):
    """Reads images, masks or questions of a subset: its row i is row ``rows[i]`` of ``reader``."""

    reader: Callable[[np.ndarray], T]
    rows: np.ndarray  # [n] int64

    def __call__(self, rows: np.ndarray) -> T:
        """What the reader gives for the subset's ``rows`` [m]."""
        return self.reader(self.rows[np.asarray(rows, dtype=np.int64)])


def digest(*values: str | bytes) -> str:
    """SHA-256 of the values in hex (64 characters). Each is preceded by its length: ("ab", "c") is not ("a", "bc")."""
    sha = hashlib.sha256()
    for value in values:
        raw = value.encode() if isinstance(value, str) else value
        sha.update(len(raw).to_bytes(8, "little"))
        sha.update(raw)
    return sha.hexdigest()
