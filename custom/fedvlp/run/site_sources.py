"""Several data sets as the sites of one simulation, each the records of one of them (spec 12.2: PMS-FM's clients)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedvlp.core.validate import require
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.screening import Screened, screen_all
from fedvlp.data.sources.table import TableSource
from fedvlp.run.config import from_config
from fedvlp.run.experiment import Source


@dataclass(frozen=True)
class SiteSources:
    """One data set for each site, whatever its own table says of sites. The site "public" is the public set.

    The labels of the cohort are those of all data sets; a label that a data set does not have is blank in its rows.
    Ids, patients and studies of a hospital's own table are its site's: two hospitals may name files and number patients
    alike. So a person whom two of them know counts as two patients.
    """

    sites: tuple[tuple[str, Source], ...]  # (name of the site, its data set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", from_config(list(self.sites)))  # FLARE builds nothing that is in a list
        repeated = [site for site, count in Counter(site for site, _ in self.sites).items() if count > 1]
        require(bool(self.sites), "sites: no sites given; give each site its data set")
        require(not repeated, f"sites: {', '.join(repeated)} has two data sets; give each site a name of its own")

    def build(self) -> Cohort:
        """The rows of all sites. Raises ValueError where two have the same records, and what the data sets raise."""
        return self.screen().build()

    def screen(self) -> Screened:
        """The reports of all sites, searched, before any image is decoded."""
        return screen_all([source for _, source in self.sites], self._joined)

    def _joined(self, built: Sequence[Cohort]) -> Cohort:
        cohorts = dict(zip(dict(self.sites), built, strict=True))
        for names in self._alike().values():
            alike = {site: cohorts[site] for site in names}
            self._refuse_shared(alike)
            Cohort.concat(list(alike.values()))  # refuses a patient who is in several splits of them
        # Whatever the other sites have, so that server and sites have the same ids for the site "public".
        local = [site for site, source in self.sites if isinstance(source, TableSource)]
        cohorts |= {site: cohorts[site].named_by(site) for site in local}
        return Cohort.concat([cohort.with_sites([site] * len(cohort)) for site, cohort in cohorts.items()])

    def _alike(self) -> dict[Path | None, list[str]]:
        """The sites whose data sets mean the same record by the same id.

        Published collections do, and tables with images in one folder. Hospitals number files and patients each for
        itself.
        """
        alike: dict[Path | None, list[str]] = {}
        for site, source in self.sites:
            alike.setdefault(source.folder() if isinstance(source, TableSource) else None, []).append(site)
        return alike

    @staticmethod
    def _refuse_shared(cohorts: dict[str, Cohort]) -> None:
        owner: dict[str, str] = {}  # id of a record: the first site that has it
        for site, cohort in cohorts.items():
            shared = Counter(owner[name] for name in cohort.ids if name in owner)
            for other, count in shared.items():
                raise ValueError(f"sites: {count} records are at {other} and at {site}; give each record to one site")
            owner |= dict.fromkeys(cohort.ids, site)


# Sites of so many patients each, drawn from published data sets (spec 12.2: CAR-MFL's clients and public set).

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
