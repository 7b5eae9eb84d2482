"""Questions about images with what people answered: what an evaluation of visual question answering reads.

They are no column of a cohort: ``Cohort.questions`` reads those of the rows that are asked for, as masks are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


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
