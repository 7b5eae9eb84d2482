"""Questions about the films of the built-in cohort: which finding, on which side, how severe. The film is the truth.

A finding that is drawn faintly and hedged in the report (label -1) is not asked about. The wording is the same at every
site, so only the image tells two films apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedvlp.data.questions import Question
from fedvlp.data.synthetic.cases import FINDINGS, SEVERITIES, SIDES, Cases

FINDING, NAME, SIDE, SEVERITY = "finding", "name", "side", "severity"
"""Kinds of questions: is it there, which one is it, where, how much."""


@dataclass(frozen=True, eq=False)
class FilmQuestions:
    """Reader of the questions about the films of a cohort."""

    cases: Cases

    def __call__(self, rows: np.ndarray) -> list[tuple[Question, ...]]:
        """The questions about each of the ``rows`` [n]."""
        return [tuple(_about(self.cases, row)) for row in rows.tolist()]


def _about(cases: Cases, row: int) -> Iterator[Question]:
    """All questions about one film: of every certain finding whether it is there, of those there the side and severity.

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
