"""The synthetic cohort: frontal chest X-rays with reports that state what is on them, drawn on demand from a seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache

import numpy as np

from fedvlp.data.cohort import Cohort, Question, digest
from fedvlp.data.synthetic.cases import FINDINGS, LABEL_SETS, SEVERITIES, SIDES, Cases, draw_cases, more_labels
from fedvlp.data.synthetic.film import Renderer
from fedvlp.data.synthetic.reports import WrittenSentences, write_captions, write_reports

# Questions about the images of the synthetic cohort: which finding, on which side, how severe. The image is the truth.
#
# A finding that is drawn faintly and hedged in the report (label -1) is not asked about. The wording is the same at
# every site, so only the image tells two images apart.

FINDING, NAME, SIDE, SEVERITY = "finding", "name", "side", "severity"
"""Kinds of questions: is it there, which one is it, where, how much."""


@dataclass(frozen=True, eq=False)
class FilmQuestions:
    """Reader of the questions about the images of a cohort."""

    cases: Cases

    def __call__(self, rows: np.ndarray) -> list[tuple[Question, ...]]:
        """The questions about each of the ``rows`` [n]."""
        return [tuple(_about(self.cases, row)) for row in rows.tolist()]


def _about(cases: Cases, row: int) -> Iterator[Question]:
    """All questions about one image: of every certain finding whether it is there; if so its side and severity.

    Where all findings are certain and exactly one is there, also which one.
    """
    certain = cases.labels[row] != -1
    for finding in np.flatnonzero(certain).tolist():
        name, present = FINDINGS[finding].lower(), bool(cases.present[row, finding])
        yield _question(f"Is {name} seen?", "yes" if present else "no", FINDING)
        if present:
            side, severity = cases.side[row, finding], cases.severity[row, finding]
            yield _question(f"On which side is the {name}?", SIDES[side], SIDE)
            yield _question(f"How severe is the {name}?", SEVERITIES[severity], SEVERITY)
    there = np.flatnonzero(cases.present[row]).tolist()
    if certain.all() and len(there) == 1:
        yield _question("What is the finding?", FINDINGS[there[0]].lower(), NAME)


def _question(text: str, answer: str, kind: str) -> Question:
    return Question(text, (answer,), answer, kind)


VERSION = 1  # raise it whenever a pixel or a word of an unchanged specification changes
ADDED = (
    "labels",
    "omitted",
    "test_rows",
    "captions",
)  # settings that old fingerprints do not know: left out where they are unused
MOST = 1_000_000  # studies; their ids have six digits
PROBES = 4  # images that enter the fingerprint, in case the version was not raised


@dataclass(frozen=True)
class SyntheticCohort:
    """Specification of the synthetic cohort. Equal specifications give equal bytes in every process.

    Raises ValueError for fewer than 4 studies a site, more than ``MOST`` studies, an ``image_size`` outside of
    32..2048, a ``beta`` that is not positive and finite, a negative ``seed``, or ``shared_habits`` that is no bool.
    """

    sites: int = 5  # named site-1..site-N
    size: int = 2000  # studies in total, one frontal image each, about 1.3 per patient
    image_size: int = 64  # pixels; anatomy and texture are the same at any size
    beta: float = 1.0  # Dirichlet concentration of the labels over sites, above 0; smaller is more skewed
    seed: int = 0  # of everything that is drawn
    hard_site: str | None = None  # name of a site made harder: noise, low contrast, bedside images, telegraphic reports
    shared_habits: bool = False  # all sites but ``hard_site`` take images and word reports as site-1 does
    label_code: str = "mention"  # class of a study for the skew: findings "mention"ed (as published) or "positive"
    labels: str = "five"  # findings, or "fourteen" with heart, devices and rare ones, which are labels but no skew
    omitted: float = 0.0  # share of what an image shows or lacks that its report leaves out, 0..1
    test_rows: int = 0  # test studies a site at least; 0: 15 % and at least 32
    captions: tuple[str, ...] = ()  # findings named by a caption that takes the report's position; none: reports

    def __post_init__(self) -> None:
        if self.sites < 1 or self.size < 4 * self.sites:
            raise ValueError(f"synthetic: {self.size} studies for {self.sites} sites; at least 4 each are needed")
        if self.size > MOST:
            raise ValueError(f"synthetic: {self.size} studies; at most {MOST:,}")
        if not 0 < self.beta < math.inf:
            raise ValueError(f"synthetic: beta is {self.beta}; expected a positive, finite number")
        if not isinstance(self.shared_habits, bool):
            raise ValueError(f"synthetic: shared_habits is {self.shared_habits!r}; expected true or false")
        if not 32 <= self.image_size <= 2048:
            raise ValueError(f"synthetic: image_size is {self.image_size}; expected 32..2048 pixels")
        if self.seed < 0:
            raise ValueError(f"synthetic: seed is {self.seed}; expected 0 or more")
        if self.labels not in LABEL_SETS:
            raise ValueError(f"synthetic: labels is {self.labels!r}; expected one of {', '.join(LABEL_SETS)}")
        if not 0 <= self.omitted <= 1:
            raise ValueError(f"synthetic: omitted is {self.omitted}; expected a share, 0 to 1")
        if not 0 <= self.test_rows <= self.size // (2 * self.sites):
            raise ValueError(
                f"synthetic: test_rows is {self.test_rows} for {self.size} studies at {self.sites} sites; expected "
                "0 or more, and at least twice as many studies a site"
            )
        object.__setattr__(self, "captions", tuple(self.captions))  # JSON knows lists only
        strange = sorted(set(self.captions) - set(FINDINGS))
        if strange:
            raise ValueError(f"synthetic: captions of {', '.join(strange)}; expected some of {', '.join(FINDINGS)}")

    def build(self) -> Cohort:
        """The cohort. Labels and reports are made now; pixels are drawn when rows are read."""
        cases, renderer = self.cases(), self.renderer()
        reports = _reports(self)
        n = len(cases)
        probes = renderer(np.linspace(0, n - 1, PROBES).astype(np.int64)).tobytes()
        labels = cases.labels if self.labels == "five" else np.hstack([cases.labels, more_labels(cases)])
        new = {f.name for f in fields(self) if f.name in ADDED and getattr(self, f.name) == f.default}
        given = {key: value for key, value in asdict(self).items() if key not in new}
        spec = f"synthetic {VERSION} " + json.dumps(given, sort_keys=True)
        return Cohort(
            ids=tuple(f"syn-image-{self.seed}-{row:06d}" for row in range(n)),
            patients=tuple(f"syn-patient-{self.seed}-{patient:06d}" for patient in cases.patient.tolist()),
            studies=tuple(f"syn-study-{self.seed}-{row:06d}" for row in range(n)),
            reports=reports,
            labels=labels.copy(),
            label_names=LABEL_SETS[self.labels],
            splits=cases.split.copy(),
            sites=tuple(cases.styles[site].name for site in cases.site.tolist()),
            images=renderer,
            fingerprint=digest(spec, "\n".join(reports), labels.tobytes(), probes),
            masks=renderer.masks,
            questions=FilmQuestions(cases),
            sentences=None if self.captions else WrittenSentences(LABEL_SETS[self.labels]),
        )

    def cases(self) -> Cases:
        """The table of cases, from which pixels and words follow."""
        return _cases(self)

    def renderer(self) -> Renderer:
        """The reader of pixels and masks."""
        return Renderer(self.cases(), self.image_size, self.seed)

    def masks(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Masks of ``rows`` [n], bool [n, S, S], by finding and for "lungs"; empty where a finding is absent."""
        return self.renderer().masks(rows)


@lru_cache(maxsize=4)
def _cases(spec: SyntheticCohort) -> Cases:
    return draw_cases(spec)


@lru_cache(maxsize=4)
def _reports(spec: SyntheticCohort) -> tuple[str, ...]:
    cases = _cases(spec)
    return write_captions(cases, spec.captions) if spec.captions else write_reports(cases)


COHORTS = {
    "label-skew": SyntheticCohort(size=12_000, beta=0.1, shared_habits=True, label_code="positive", test_rows=1000),
    "scanner-shift": SyntheticCohort(size=12_000, beta=0.3, hard_site="site-5", test_rows=1000),
}
"""By name: one scanner and very different findings, as in the papers; other scanners and habits, and one hard site."""
