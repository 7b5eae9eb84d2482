"""The built-in cohort: frontal chest films with reports that state what is on them, drawn on demand from a seed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from fedvlp.data.cohort import Cohort, digest
from fedvlp.data.synthetic.cases import FINDINGS, Cases, draw_cases
from fedvlp.data.synthetic.film import Renderer
from fedvlp.data.synthetic.reports import write_reports

VERSION = 1  # raise whenever a pixel or a word of an unchanged specification changes
PROBES = 4  # films that enter the fingerprint, in case the version was not raised


@dataclass(frozen=True)
class SyntheticCohort:
    """Specification of the built-in cohort. Equal specifications give equal bytes in every process."""

    sites: int = 5  # named site-1..site-N
    size: int = 2000  # studies in total, one frontal film each, about 1.3 per patient
    image_size: int = 64  # pixels; anatomy and texture are the same at any size
    beta: float = 1.0  # Dirichlet concentration of the label skew over sites, smaller = more skewed
    seed: int = 0
    hard_site: str | None = None  # a site made harder: noise, low contrast, bedside films, telegraphic reports
    shared_habits: bool = False  # every site takes films and words reports as site-1 does; only findings differ
    label_code: str = "mention"  # what the skew is over: findings mentioned (as published) or "positive"

    def __post_init__(self) -> None:
        if self.sites < 1 or self.size < 4 * self.sites:
            raise ValueError(f"synthetic: {self.size} studies for {self.sites} sites; at least 4 each are needed")
        if not 32 <= self.image_size <= 2048:
            raise ValueError(f"synthetic: image_size is {self.image_size}; expected 32..2048 pixels")
        if self.seed < 0:
            raise ValueError(f"synthetic: seed is {self.seed}; expected 0 or more")

    def build(self) -> Cohort:
        """The cohort: labels and reports now, pixels of the rows that are asked for when they are asked for."""
        cases, renderer = self.cases(), self.renderer()
        reports = _reports(self)
        n = len(cases)
        probes = renderer(np.linspace(0, n - 1, PROBES).astype(np.int64)).tobytes()
        spec = f"synthetic {VERSION} " + json.dumps(asdict(self), sort_keys=True)
        return Cohort(
            ids=tuple(f"syn-image-{self.seed}-{row:06d}" for row in range(n)),
            patients=tuple(f"syn-patient-{self.seed}-{patient:06d}" for patient in cases.patient.tolist()),
            studies=tuple(f"syn-study-{self.seed}-{row:06d}" for row in range(n)),
            reports=reports,
            labels=cases.labels.copy(),
            label_names=FINDINGS,
            splits=cases.split.copy(),
            sites=tuple(cases.styles[site].name for site in cases.site.tolist()),
            images=renderer,
            fingerprint=digest(spec, "\n".join(reports), cases.labels.tobytes(), probes),
        )

    def cases(self) -> Cases:
        """What every row shows, from which pixels and words follow."""
        return _cases(self)

    def renderer(self) -> Renderer:
        """The reader of pixels and masks."""
        return Renderer(self.cases(), self.image_size, self.seed)

    def masks(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Bool [n, S, S] for each finding and for "lungs"; a finding's mask is empty where it is absent."""
        return self.renderer().masks(rows)


@lru_cache(maxsize=4)
def _cases(spec: SyntheticCohort) -> Cases:
    return draw_cases(spec)


@lru_cache(maxsize=4)
def _reports(spec: SyntheticCohort) -> tuple[str, ...]:
    return write_reports(_cases(spec))
