"""Several data sets as the sites of one simulation, each the records of one of them (spec 12.2: PMS-FM's clients)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedvlp.core.validate import require
from fedvlp.data.cohort import Cohort
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
        require(bool(self.sites), "sites: there is none; give each site its data set")
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

        Published collections do, and tables with films in one folder. Hospitals number files and patients each for
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
