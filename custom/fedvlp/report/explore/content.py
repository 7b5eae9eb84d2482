"""What the page of a trained model shows of a data set: records near a phrase or an image, findings, the space.

Nothing here knows how a page is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.data.cohort import Cohort, NoRecordsError
from fedvlp.data.loader import eval_batch
from fedvlp.data.record_ids import as_written
from fedvlp.evaluation.attribution import Attribution, attribution
from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.findings import FindingHeads
from fedvlp.models.use import class_cosines, sentences_of
from fedvlp.report.sections import components
from fedvlp.run.finding_probe import pooled
from fedvlp.run.search import image_vectors, ranked, rows_of, text_vectors

FILMS, REPORTS = "images", "reports"
"""Whose vectors are asked for."""

SITE, SPLIT = "site", "split"
"""What a projection may be coloured by, beside the labels."""

STATES = {1.0: "present", 0.0: "absent", -1.0: "uncertain"}
NOT_MENTIONED = "not mentioned"

POINTS = 2000
"""Records that a projection shows at most: more would hide each other, and the browser would be slow."""


SIDE = 1024
"""Longer side of an image that is looked at, pixels."""

EQUAL = 1e-6
"""Cosines that differ by less are equal: an image alone has not the last bits that it has among others."""


@dataclass(frozen=True, eq=False)
class Record:
    """A record of the data set as the page shows it, to the eyes of the records' owner alone."""

    index: int  # of the explorer's records
    key: str  # as others may see it
    site: str  # "" where there is none
    split: str
    labels: tuple[str, ...]  # those that are present, and with a question mark those that are uncertain
    report: str  # "" where there is none
    pixels: np.ndarray | None  # uint8 [L, L], or [L, L, 3] in colour; None where there is no image
    cosine: float  # with what was asked, -1..1; nan where nothing was


@dataclass(frozen=True, eq=False)
class Film:
    """An image as the model sees it, and its vector. Holds neither the name nor the bytes of the file."""

    prepared: Tensor  # float32 [C, S, S] in -1..1
    vector: Tensor  # unit vector [d]


@dataclass(frozen=True)
class Finding:
    """How near an image is to a class, and how near the images of the data set are to it."""

    name: str
    cosine: float  # mean over the sentences of the class, -1..1
    below: float  # share of the data set's images whose cosine is lower, 0..1


@dataclass(frozen=True, eq=False)
class Projection:
    """Vectors in the plane of their first two principal components."""

    points: np.ndarray  # [m, 2] float64
    indices: tuple[int, ...]  # [m], of the explorer's records
    groups: tuple[str, ...]  # [m], what each point is coloured by
    shares: tuple[float, float]  # of the vectors' variance that each component has, 0..1
    total: int  # records with such a vector, of which at most ``POINTS`` are drawn


@dataclass(frozen=True, eq=False)
class Explorer:
    """A trained model and the n records of a data set, whose vectors are computed once and asked many times."""

    model: DualEncoder
    cohort: Cohort
    rows: np.ndarray  # [n], of the cohort
    keys: tuple[str, ...]  # [n], of the records, as others may see them (data/record_ids.py)
    films: Tensor  # unit vectors [n, d] float32, nan where a record has no image
    reports: Tensor  # unit vectors [n, d] float32, nan where a record has no report
    written: Mapping[str, str] = field(default_factory=dict)  # id -> report as somebody wrote it
    heads: FindingHeads | None = None  # for findings, beside the model
    zero_shot_at_chance: bool = False  # whether the run's test images say that classes by words are no better

    @classmethod
    def of(
        cls,
        model: DualEncoder,
        cohort: Cohort,
        split: str | None = None,
        written: Mapping[str, str] | None = None,
        heads: FindingHeads | None = None,
    ) -> Explorer:
        """Of all records of ``cohort``, or of those of a split; its images are decoded as ``model`` needs them.

        ``written``: id -> report as it is to be shown, where that is not the cohort's own.

        Raises ValueError for a model that was not trained to compare images with texts, an unknown split, and records
        none of which has an image.
        """
        model.require_comparable("explore")
        rows = rows_of(cohort, split)
        if not cohort.has_image()[rows].any():
            raise NoRecordsError("explore: no record there has an image; give data with images, or another split")
        shown = as_written(cohort)
        keys = tuple(shown[cohort.ids[row]] for row in rows)
        images, reports = image_vectors(model, cohort, rows), text_vectors(model, cohort, rows)
        return cls(model, cohort, rows, keys, images, reports, written or {}, heads)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def colourings(self) -> list[str]:
        """What a projection can be coloured by: the site where records have one, the split, the labels."""
        return [*([] if self.cohort.sites is None else [SITE]), SPLIT, *self.cohort.label_names]

    def near(self, vector: Tensor, top: int, among: str = FILMS) -> list[Record]:
        """The ``top`` studies whose images, or ``among`` reports, are nearest to a unit vector [d]: one record each."""
        studies: dict[str, tuple[int, float]] = {}
        for index, cosine in ranked(self.films if among == FILMS else self.reports, vector, len(self)):
            study = self.cohort.studies[self.rows[index]] or f"record {index}"
            studies.setdefault(study, (index, cosine))
            if len(studies) == top:
                break
        return self._records(list(studies.values()))

    def original(self, index: int) -> np.ndarray:
        """The image of a record as its file has it, uint8. Raises ValueError for a record without an image."""
        if not self.cohort.has_image()[self.rows[index]]:
            raise ValueError("this record has no image; choose another")
        return self.cohort.original(int(self.rows[index]), SIDE)

    def name_of(self, index: int) -> str:
        """Name of a record's file, for its owner alone; "" where it is not known."""
        file = self.cohort.files[self.rows[index]] if self.cohort.files else None
        return "" if file is None else file.name

    def report(self, row: int) -> str:
        """The report of a row of the cohort, as it was written where that is known."""
        return self.written.get(self.cohort.ids[row], self.cohort.reports[row])

    def near_phrase(self, phrase: str, top: int) -> list[Record]:
        """The ``top`` records whose images are nearest to a phrase. Raises ValueError for an empty one."""
        return self.near(self.model.encode_text(_said(phrase)), top)

    def record(self, index: int) -> Record:
        """One record, of which nothing was asked: its cosine is nan. Raises ValueError for an index that is none."""
        if not 0 <= index < len(self):
            raise ValueError(f"there is no record {index}; expected 0 to {len(self) - 1}")
        return self._records([(index, math.nan)])[0]

    def film(self, film: Any) -> Film:
        """An image of a person's own, as ``preprocess`` takes it. Raises ValueError as that does; no path is in it."""
        prepared = self.model.preprocess(film)
        return Film(prepared, self.model.encode_image(prepared).float().cpu())

    def film_of(self, index: int) -> Film:
        """The image of a record. Raises ValueError for a record without an image."""
        row = self.rows[[index]]
        if not self.cohort.has_image()[row][0]:
            raise ValueError("this record has no image; choose another")
        levels = torch.from_numpy(self.cohort.images(row))  # decoded already
        prepared = eval_batch(levels, self.model.config.image_size)[0]
        return Film(prepared, self.model.encode_image(prepared).float().cpu())

    def findings(self, film: Film, classes: Sequence[str] | None = None) -> list[Finding]:
        """Each class with the share of the data set's images that are less like it, the largest share first.

        ``classes``: names, or phrases; None: the model's own. Cosines of different classes cannot be compared; these
        shares can. Raises ValueError for a model without classes of its own, where none are given.
        """
        named = sentences_of(classes, self.model.prompts)
        own = class_cosines(self.model, film.vector, named)
        others = class_cosines(self.model, self.films[~self.films[:, 0].isnan()], named)
        findings = [
            Finding(name, float(own[name]), float((others[name] < own[name] - EQUAL).double().mean())) for name in named
        ]
        return sorted(findings, key=lambda finding: -finding.below)

    def stated(self, film: Film) -> list[tuple[str, float, Mapping[str, float]]]:
        """Each finding that has a head, its probability in an image, and what is known of the head; likely ones first.

        None without heads.
        """
        if self.heads is None:
            return []
        stated = self.heads.probabilities(pooled(self.model, film.prepared[None]))[0].tolist()
        rows = [
            (name, one, self.heads.figures.get(name, {})) for name, one in zip(self.heads.names, stated, strict=True)
        ]
        return sorted(rows, key=lambda row: -row[1])

    def looked(self, film: Film, phrase: str) -> Attribution:
        """Where in an image the model looks for a phrase. Raises ValueError for an empty phrase."""
        return attribution(self.model, film.prepared, _said(phrase))

    def projection(self, among: str, colour: str) -> Projection:
        """The vectors of images or reports in the plane. ``colour`` is one of ``colourings``.

        Of more than ``POINTS`` records, so many are drawn by lot, always the same. Raises ValueError where fewer than
        three records have such a vector, and for another colour.
        """
        vectors = self.films if among == FILMS else self.reports
        there = torch.nonzero(~vectors[:, 0].isnan()).flatten()
        total = len(there)
        if total < 3:
            raise ValueError(f"a projection needs at least 3 {among}, and the data set has {total} here")
        if total > POINTS:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
            there = there[order[:POINTS]].sort().values
        chosen = vectors[there].double()
        points = components({among: chosen})[among]
        spread = float((chosen - chosen.mean(0)).square().sum())
        first, second = (float(axis.square().sum()) / spread if spread > 0 else 0.0 for axis in points.T)
        indices = tuple(there.tolist())
        return Projection(points.numpy(), indices, self._groups(indices, colour), (first, second), total)

    def _groups(self, indices: Sequence[int], colour: str) -> tuple[str, ...]:
        """By record what it is coloured by."""
        if colour not in self.colourings:
            raise ValueError(f"unknown colour {colour!r}; there are: {', '.join(self.colourings)}")
        rows = self.rows[list(indices)].tolist()
        if colour == SITE and self.cohort.sites is not None:
            return tuple(self.cohort.sites[row] for row in rows)
        if colour == SPLIT:
            return tuple(str(self.cohort.splits[row]) for row in rows)
        column = self.cohort.labels[:, self.cohort.label_names.index(colour)]
        return tuple(STATES.get(float(column[row]), NOT_MENTIONED) for row in rows)

    def _records(self, nearest: Sequence[tuple[int, float]]) -> list[Record]:
        """The records of (index, cosine), with their images."""
        rows = self.rows[[index for index, _ in nearest]]
        imaged = self.cohort.has_image()[rows] if len(rows) else np.zeros(0, dtype=bool)
        pixels = iter(self.cohort.images(rows[imaged]) if imaged.any() else ())
        return [
            Record(
                index=index,
                key=self.keys[index],
                site="" if self.cohort.sites is None else self.cohort.sites[row],
                split=str(self.cohort.splits[row]),
                labels=self._labels(row),
                report=self.report(row),
                pixels=next(pixels) if there else None,
                cosine=cosine,
            )
            for (index, cosine), row, there in zip(nearest, rows.tolist(), imaged, strict=True)
        ]

    def _labels(self, row: int) -> tuple[str, ...]:
        marks = {1.0: "", -1.0: "?"}
        values = zip(self.cohort.label_names, self.cohort.labels[row].tolist(), strict=True)
        return tuple(f"{name}{marks[value]}" for name, value in values if value in marks)


def _said(phrase: str) -> str:
    """The phrase without spaces around it. Raises ValueError for an empty one."""
    if not phrase.strip():
        raise ValueError('the phrase is empty; type one, e.g. "left basal effusion"')
    return phrase.strip()
