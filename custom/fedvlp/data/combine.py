"""Several cohorts as one, e.g. a site with images, one with reports and one with pairs, each from its own source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from fedvlp.data.record import Cohort, digest

Reader = Callable[[np.ndarray], np.ndarray]


def combine(cohorts: Sequence[Cohort]) -> Cohort:
    """The rows of all, in order. Every cohort has its sites, and all have the same label names and image size."""
    names = {cohort.label_names for cohort in cohorts}
    if len(names) != 1:
        raise ValueError(f"combine: {len(cohorts)} cohorts with {len(names)} lists of label names; map them to one")
    if any(cohort.sites is None for cohort in cohorts):
        raise ValueError("combine: a cohort has no sites; name them with with_sites first")

    def together(column: str) -> tuple[str, ...]:
        return tuple(chain.from_iterable(getattr(cohort, column) for cohort in cohorts))

    return Cohort(
        ids=together("ids"),
        patients=together("patients"),
        studies=together("studies"),
        reports=together("reports"),
        labels=np.concatenate([cohort.labels for cohort in cohorts]),
        label_names=cohorts[0].label_names,
        splits=np.concatenate([np.asarray(cohort.splits) for cohort in cohorts]),
        sites=together("sites"),
        images=_Readers(tuple(cohort.images for cohort in cohorts), np.cumsum([len(cohort) for cohort in cohorts])),
        fingerprint=digest(*(cohort.fingerprint for cohort in cohorts)),
        imaged=np.concatenate([cohort.has_image() for cohort in cohorts]),
    )


@dataclass(frozen=True, eq=False)
class _Readers:
    """Reads every row by the reader of its cohort."""

    readers: tuple[Reader, ...]
    ends: np.ndarray  # [C] rows up to the end of each cohort

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64)
        owner = np.searchsorted(self.ends, rows, side="right")
        parts = {c: self.readers[c](rows[owner == c] - (self.ends[c - 1] if c else 0)) for c in np.unique(owner)}
        if len(parts) == 1:
            return next(iter(parts.values()))
        images = np.zeros((len(rows), *next(iter(parts.values())).shape[1:]), dtype=np.uint8)
        for cohort, pixels in parts.items():
            images[owner == cohort] = pixels
        return images
