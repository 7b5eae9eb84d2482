"""What every data set of files becomes: the listing of its usable rows, then a cohort with a summary of what was used.

A row has an image, a report, or both. Sources differ in how they list their rows; all else is done here, once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from fedvlp.data.burned_in import HEADER, REASON
from fedvlp.data.cache_build import SERIAL, Building, shape_of
from fedvlp.data.cohort import Cohort, HeldQuestions, Question, Rows, Sentences, digest
from fedvlp.data.images import films, unsearched
from fedvlp.data.masks import Box, BoxMasks
from fedvlp.data.screening import BY_VIEW, SKIPPED, DataSource, Screened, searched
from fedvlp.data.subgroups import VIEW, table_of, view_of

T = TypeVar("T")

log = logging.getLogger(__name__)

BELOW_ROOT = {"below_root": True}
"""Metadata of a source's field that is a file or a folder of the data set: at a site it lies below the set's root."""

IMAGE_ALONE, REPORT_ALONE = "with an image alone", "with a report alone"
"""What a summary counts of the used rows, where some are pairs or both kinds are there."""

Masks = Callable[[np.ndarray], "dict[str, np.ndarray]"]
"""Rows [n] to the masks of each structure, bool [n, S, S]."""


@dataclass(frozen=True, eq=False, repr=False)
class Listing:
    """The N usable rows of a data set before any image is read. It shows nothing of them."""

    source: str  # name of the source, for messages and hashes
    keys: Sequence[str]  # the collection's own name of each row, unique
    patients: Sequence[str]
    studies: Sequence[str]
    reports: Sequence[str]  # "" where a row has no text
    labels: np.ndarray  # [N, L] float32, as in a cohort
    names: tuple[str, ...]  # of the L labels
    splits: Sequence[str]  # "train", "val", "test"; "" is drawn by patient
    files: Sequence[Path | None] | None = None  # image of each row, None: it has none; None: no image is read
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason -> rows of the collection that are not listed
    noted: Mapping[str, int] = field(default_factory=dict)  # what else the summary says of listed rows -> how many
    phi: Mapping[str, int] = field(default_factory=dict)  # kind of identifier -> raw reports that hold one
    questions: Sequence[tuple[Question, ...]] | None = None  # about each row's image; None: the collection has none
    boxes: Mapping[str, Sequence[tuple[Box, ...]]] | None = None  # structure -> outlines of each row's; None: no masks
    # sex, age, ... -> that of each row; "" unknown
    subgroups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    people: str = ""  # the source whose records and patients these are, where it is another
    # Of a hospital's own table:
    private: bool = False  # keys, patients and studies are hashes already, and the splits are as somebody wrote them
    sites: Sequence[str] | None = None  # of each row; None: they are still to be dealt to sites
    numbers: Sequence[str] | None = None  # what messages call each row; None: its key
    skipped: Mapping[str, Sequence[str]] = field(default_factory=dict)  # reason -> what unusable rows are called
    written: Sequence[str] | None = None  # report of each row as somebody wrote it, yet to be searched; None: see phi
    masks: Masks | None = None  # of each row
    sentences: Sentences | None = None
    marks: tuple[str, ...] = ()  # hashes of what else the cohort depends on

    def of_rows(self, rows: Sequence[int]) -> Listing:
        """The listing of these ``rows`` alone."""

        def pick(column: Sequence[T]) -> list[T]:
            return [column[row] for row in rows]

        columns: tuple[str, ...] = ("keys", "patients", "studies", "reports", "splits", "files", "questions")
        columns += ("sites", "numbers", "written")
        given: dict[str, Any] = {name: pick(column) for name in columns if (column := getattr(self, name)) is not None}
        if self.boxes is not None:
            given["boxes"] = {name: pick(column) for name, column in self.boxes.items()}
        if self.masks is not None:
            given["masks"] = Rows(self.masks, np.asarray(rows, dtype=np.int64))
        given["subgroups"] = {name: pick(column) for name, column in self.subgroups.items()}
        return replace(self, labels=self.labels[list(rows)], **given)

    def hashed(self, kind: str, values: Sequence[str]) -> tuple[str, ...]:
        """The values as hashes of 16 hex digits, different for each collection and ``kind``."""
        if self.private:
            return tuple(values)
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
class Placed:
    """Reader of N rows of which row i has the image ``owner[i]`` of another reader, or none."""

    images: Images
    owner: np.ndarray  # [N] int64; -1: the row has no image, and is black
    shape: tuple[int, ...]  # of an image

    @property
    def skipped(self) -> dict[int, str]:
        """Row -> reason, for the rows that have no readable image."""
        unread = self.images.skipped
        return {row: unread[index] for row, index in enumerate(self.owner.tolist()) if index in unread}

    @property
    def checksums(self) -> np.ndarray:
        """CRC-32 of each row's pixels, [N] uint32; 0 without an image."""
        return np.append(self.images.checksums, np.uint32(0))[self.owner]

    @property
    def stored(self) -> Sequence[str]:
        """How each row's file stores its image."""
        of_images = [*self.images.stored, ""]
        return [of_images[index] for index in self.owner.tolist()]

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S] or [n, S, S, 3] of ``rows`` [n]."""
        wanted = self.owner[np.asarray(rows, dtype=np.int64)]
        pixels = np.zeros((len(wanted), *self.shape), dtype=np.uint8)
        if (imaged := wanted >= 0).any():
            pixels[imaged] = self.images(wanted[imaged])
        return pixels


@dataclass(frozen=True, kw_only=True)
class Listed(DataSource):
    """Base class of all data sets of files: a source implements ``listing``."""

    table: ClassVar[str] = ""  # usual value of ``path``, relative to root, as the collection is published

    image_size: int = 256  # side of the decoded square, pixels
    val_fraction: float = 0.1  # of the patients, 0..1, where there is no validation split
    test_fraction: float = 0.2  # of the patients, 0..1, where there is no test split
    seed: int = 0  # of the drawn splits
    cache: str | None = None  # folder for decoded images and for tokens; None: made in memory by every process
    burned_in: str = HEADER  # text in images: search | header | accept; what is published has been looked at

    def listing(self) -> Listing:
        """The usable rows. Raises ValueError that names missing tables or columns, or counts missing files."""
        raise NotImplementedError

    def build(self) -> Cohort:
        """Reads tables and images. Raises ValueError if something of the data set is missing."""
        return self.prepare()[0]

    def summary(self) -> dict[str, int]:
        """What is counted (rows, used, "skipped: <reason>", ...) -> how many. Reads everything, as ``build`` does."""
        return self.prepare()[1]

    def prepare(self, most: int | None = None, building: Building = SERIAL) -> tuple[Cohort, dict[str, int]]:
        """The cohort and its ``summary``. ``most`` takes the first usable rows only, as a quick check.

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
        skipped = {reason: list(rows) for reason, rows in listing.skipped.items()}
        self._refuse(listing, skipped)
        if listing.written is not None:
            numbers = (listing.numbers or listing.keys)[:most]
            reported = [row for row, text in enumerate(listing.written[:most]) if text]
            texts = [listing.written[row] for row in reported]
            listing = replace(listing, phi=searched(self.cache, texts, (numbers[row] for row in reported)))
        decode = partial(self._prepare, listing, most, building, skipped)
        return Screened(listing.phi, len(listing.keys[:most]), decode, skipped)

    def _present(self) -> Listing:
        """The listing of the rows whose images are there."""
        return self.listing()

    def _refuse(self, listing: Listing, skipped: Mapping[str, Sequence[str]]) -> None:
        """Raises ValueError where too many rows were ``skipped`` (reason -> rows), before and after decoding."""
        if not listing.keys:
            raise ValueError(f"{listing.source} source: no usable record; look at path and root")
        if len(listing.keys) <= sum(map(len, skipped.values())):
            raise ValueError(f"{listing.source} source: none of {len(listing.keys)} images can be read")

    def _admitted(self, listing: Listing, rows: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
        """Those of the readable ``rows`` [n] that are used, and what others are left out for."""
        return rows, {}

    def _prepare(
        self, listing: Listing, most: int | None, building: Building, skipped: dict[str, list[str]]
    ) -> tuple[Cohort, dict[str, int]]:
        """``prepare`` of what is listed; ``skipped`` takes the names of the rows whose images cannot be read."""
        rows = np.arange(len(listing.keys))[:most]
        ids = listing.hashed("record", listing.keys)
        images = self._images(listing, ids, len(rows), building)
        if images is not None:
            unreadable = images.skipped
            names = listing.numbers or listing.keys
            for row, reason in unreadable.items():
                skipped.setdefault(reason, []).append(names[row])
            rows = np.array([row for row in rows.tolist() if row not in unreadable], dtype=np.int64)
            self._refuse(listing, skipped)
        searchable = len(rows)
        rows, few = self._admitted(listing, rows)
        cohort = self._cohort(listing, ids, rows, images)
        unlisted = sum(listing.left_out.values()) + sum(map(len, listing.skipped.values()))
        summary = {"rows": len(ids) + unlisted, "used": len(cohort), "patients": len(set(cohort.patients))}
        summary |= self._halves(cohort)
        if not listing.private and (moved := by_patient(listing.patients, listing.splits)[1]):
            summary["moved to the split of their patient"] = moved
        summary |= {f"{SKIPPED}{reason}": count for reason, count in {**listing.left_out, **few}.items()}
        summary |= listing.noted
        summary |= {f"{SKIPPED}{reason}": len(names) for reason, names in sorted(skipped.items())}
        if images is not None:
            with_text = [row for row, reason in images.skipped.items() if reason == REASON]
            summary |= _count_views(listing.subgroups.get(VIEW, ()), with_text)
        if images is not None and (listing.private or self.burned_in != HEADER):  # which goes without saying
            bare = 0 if listing.files is None else sum(listing.files[row] is None for row in range(len(ids))[:most])
            summary |= unsearched(self.burned_in, searchable - bare, listing.source)
        log.info("%s source: %s", listing.source, ", ".join(f"{name} {count}" for name, count in summary.items()))
        return cohort, summary

    @staticmethod
    def _halves(cohort: Cohort) -> dict[str, int]:
        """How many records have an image or a report alone, where not all are alike."""
        image, report = cohort.has_image(), cohort.has_report()
        counts = {IMAGE_ALONE: int((image & ~report).sum()), REPORT_ALONE: int((report & ~image).sum())}
        return {name: count for name, count in counts.items() if 0 < count < len(cohort)}

    def _images(self, listing: Listing, ids: Sequence[str], most: int, building: Building) -> Images | None:
        """The reader of the first ``most`` images; None for a data set without.

        A file that several rows have is decoded and kept once.
        """
        of_rows = (listing.files or ())[:most]
        first: dict[Path, str] = {}  # file -> id of the first row that has it
        for name, file in zip(ids, of_rows, strict=False):
            if file is not None:
                first.setdefault(file, name)
        if not first:
            return None
        given = (self.image_size, self.cache, building, self.burned_in, self.in_colour)
        images = films(listing.source, list(first.values()), list(first), *given)
        if len(first) == len(of_rows):
            return images
        number = {file: index for index, file in enumerate(first)}
        owner = np.array([-1 if file is None else number[file] for file in of_rows], dtype=np.int64)
        return Placed(images, owner, shape_of(self.image_size, self.in_colour))

    def _cohort(self, listing: Listing, ids: Sequence[str], rows: np.ndarray, images: Images | None) -> Cohort:
        """The cohort of the chosen rows [n] of a listing."""

        def pick(column: Sequence[T]) -> tuple[T, ...]:
            return tuple(column[row] for row in rows)

        ids, reports, labels = pick(ids), pick(listing.reports), listing.labels[rows]
        patients, studies = (
            listing.hashed(kind, pick(of_rows))
            for kind, of_rows in {"patient": listing.patients, "study": listing.studies}.items()
        )
        sites = None if listing.sites is None else pick(listing.sites)
        given = pick(listing.splits if listing.private else by_patient(listing.patients, listing.splits)[0])
        val = 0.0 if "val" in given else self.val_fraction
        test = 0.0 if "test" in given else self.test_fraction
        drawn = draw_splits(patients, sites, val, test, self.seed).tolist()
        splits = np.array([published or draw for published, draw in zip(given, drawn, strict=True)])
        content = [digest(*column) for column in (ids, patients, reports, listing.names, splits.tolist())]
        content += [digest(*studies), digest(*sites or ()), *listing.marks] if listing.private else []
        asked = None if listing.questions is None else pick(listing.questions)
        masks: Masks | None = None if listing.masks is None else Rows(listing.masks, rows)
        if listing.boxes is not None:
            masks = BoxMasks({name: pick(of_rows) for name, of_rows in listing.boxes.items()}, self.image_size)
        content += [] if asked is None else [digest(*map(_contents, chain.from_iterable(asked)))]
        subgroups, subgroup_names = table_of({name: pick(given) for name, given in listing.subgroups.items()})
        checksums = b"" if images is None else images.checksums[rows].astype("<u4").tobytes()
        files = None if listing.files is None else pick(listing.files)
        imaged = np.full(len(ids), images is not None)
        if files is not None and None in files:
            imaged = np.array([file is not None for file in files])
            content.append(digest(np.packbits(imaged).tobytes()))
        return Cohort(
            ids=ids,
            patients=patients,
            studies=studies,
            reports=reports,
            labels=labels,
            label_names=listing.names,
            splits=splits,
            sites=sites,
            images=NoImages(self.image_size) if images is None else Rows(images, rows),
            fingerprint=digest(*content, labels.astype("<f4").tobytes(), checksums),
            imaged=imaged,
            phi=dict(listing.phi),
            private=listing.private,
            masks=masks,
            questions=None if asked is None else HeldQuestions(asked),
            sentences=listing.sentences,
            channels=3 if images is not None and self.in_colour else 1,
            subgroups=subgroups,
            subgroup_names=subgroup_names,
            stored=None if images is None else pick(images.stored),
            files=files,
        )


def _count_views(views: Sequence[str], rows: Sequence[int]) -> dict[str, int]:
    """Count the ``rows`` of images with burned-in text by view, where the data set says one of theirs."""
    counts = Counter(view_of(views[row]) or "not known" for row in rows if views)
    return {f"{BY_VIEW}{view}": count for view, count in sorted(counts.items())} if set(counts) - {"not known"} else {}


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


def draw_splits(patients: Sequence[str], sites: Sequence[str] | None, val: float, test: float, seed: int) -> np.ndarray:
    """Split [N] of each row, drawn by patient within each site; it does not depend on the order of the rows.

    ``val`` and ``test`` are shares of the patients, 0..1. A patient seen at several sites is drawn once, at the first
    by name. At least one patient of each site stays in training.
    """
    home: dict[str, str] = {}  # patient -> the site where it is drawn
    for patient, site in zip(patients, sites or [""] * len(patients), strict=True):
        home[patient] = min(site, home.get(patient, site))
    rng = np.random.default_rng(seed)
    split: dict[str, str] = {}
    for site in sorted(set(home.values())):
        own = sorted(patient for patient, own_site in home.items() if own_site == site)
        order = rng.permutation(own).tolist()
        held_out = min(round((val + test) * len(order)), len(order) - 1)
        tested = min(round(test * len(order)), held_out)
        split |= dict.fromkeys(order[:tested], "test")
        split |= dict.fromkeys(order[tested:held_out], "val")
        split |= dict.fromkeys(order[held_out:], "train")
    return np.array([split[patient] for patient in patients], dtype="<U5")


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
