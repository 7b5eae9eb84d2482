"""Sites of so many patients each, drawn from published data sets (spec 12.2: CAR-MFL's clients and public set)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedvlp.core.validate import require
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.screening import Screened, screen_all
from fedvlp.run.config import from_config
from fedvlp.run.experiment import Source

Shares = Sequence[tuple[str, int]]
"""(name of a site, or "public"; number of its patients, 0 for an equal share of those whom nobody has)."""

NOBODY = ""


@dataclass(frozen=True)
class PatientSites:
    """Sites and a public set of so many training patients each; no patient is at two of them.

    Held-out records of a data set that gives the public set some patients are the public set's. Those of the others are
    left out, since CAR-MFL's test records are pairs of one collection. Differs: the authors' partitions are
    positions in their own file of annotations, so patients are drawn anew.
    """

    collections: tuple[tuple[Source, Shares], ...]  # (a data set, who has how many of its patients)
    seed: int = 0  # of the draw of the patients

    def __post_init__(self) -> None:
        object.__setattr__(self, "collections", _plain(self.collections))
        names = Counter(site for _, shares in self.collections for site, _ in shares)
        repeated = [site for site, count in names.items() if count > 1]
        negative = [site for _, shares in self.collections for site, count in shares if count < 0]
        require(bool(names), "collections: there is no site; give a data set the names and patients of its sites")
        require(not repeated, f"collections: {', '.join(repeated)} is named twice; name each site once")
        require(not negative, f"collections: {', '.join(negative)} has fewer than 0 patients; 0 is an equal share")

    def build(self) -> Cohort:
        """The rows of all sites. Raises ValueError where a data set has too few patients, and what data sets raise."""
        return self.screen().build()

    def screen(self) -> Screened:
        """The reports of all data sets, searched, before any image is decoded."""
        return screen_all([source for source, _ in self.collections], self._dealt)

    def _dealt(self, cohorts: Sequence[Cohort]) -> Cohort:
        dealt = []
        for number, (cohort, (_, shares)) in enumerate(zip(cohorts, self.collections, strict=True)):
            owner = deal(cohort, shares, self.seed + number)
            rows = np.flatnonzero(owner != NOBODY)
            dealt.append(cohort.take(rows).with_sites(owner[rows].tolist()))
        return Cohort.concat(dealt)


def deal(cohort: Cohort, shares: Shares, seed: int) -> np.ndarray:
    """Site [N] str of each row, "" at none. The first shares have the same patients whatever the later ones ask for.

    Raises ValueError where there are too few training patients.
    """
    patients, splits = np.asarray(cohort.patients), np.asarray(cohort.splits)
    people = np.random.default_rng(seed).permutation(np.unique(patients[splits == "train"]))
    counts = _numbers(shares, len(people))
    sites = [site for site, _ in shares]
    site_of = dict(zip(people.tolist(), np.repeat(sites, counts).tolist(), strict=False))
    held_out = PUBLIC if PUBLIC in sites else NOBODY
    return np.array(
        [
            site_of.get(patient, NOBODY) if split == "train" else held_out
            for patient, split in zip(patients.tolist(), splits.tolist(), strict=True)
        ]
    )


def _numbers(shares: Shares, people: int) -> list[int]:
    """The number of patients of each share, of so many ``people``."""
    asked, equal = sum(count for _, count in shares), sum(count == 0 for _, count in shares)
    if asked + equal > people:
        raise ValueError(
            f"patient sites: {people} patients in the training split, expected at least {asked + equal} for "
            f"{len(shares)} sites; ask for fewer patients, or give the whole data set"
        )
    each = (people - asked) // max(1, equal)
    return [count or each for _, count in shares]


def _plain(collections: Any) -> Any:
    """Tuples alone, with their data sets built: JSON knows lists, and FLARE builds nothing that is in one."""
    if isinstance(collections, (list, tuple)):
        return tuple(_plain(item) for item in collections)
    return from_config(collections)
