"""Questions about drawn films are answered by what the film shows, and by nothing that is uncertain."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fedvlp.data.synthetic.cases import FINDINGS, PNEUMONIA, SEVERITIES, SIDES
from fedvlp.data.synthetic.drawn_cohort import FINDING, NAME, SEVERITY, SIDE, SyntheticCohort

SPEC = SyntheticCohort(sites=2, size=400, image_size=32, seed=3)


def test_answers_are_what_the_film_shows() -> None:
    """Of the pneumonia on every film: asked about unless it is uncertain, its side and severity where it is there."""
    cohort, cases = SPEC.build(), SPEC.cases()
    assert cohort.questions is not None
    asked = cohort.questions(np.arange(len(cohort)))
    counted = Counter[str]()
    for row, questions in enumerate(asked):
        said = {question.text: question.common for question in questions}
        assert len(said) == len(questions), "no question is asked twice"
        uncertain, present = cohort.labels[row, PNEUMONIA] == -1, cases.present[row, PNEUMONIA]
        expected = None if uncertain else "yes" if present else "no"
        assert said.get("Is pneumonia seen?") == expected
        seen = present and not uncertain
        assert said.get("On which side is the pneumonia?") == (SIDES[cases.side[row, PNEUMONIA]] if seen else None)
        severity = SEVERITIES[cases.severity[row, PNEUMONIA]]
        assert said.get("How severe is the pneumonia?") == (severity if seen else None)
        counted.update(question.kind for question in questions)
    certain = cohort.labels != -1
    assert counted[FINDING] == certain.sum()
    assert counted[SIDE] == counted[SEVERITY] == (cases.present & certain).sum()
    assert counted[NAME] == (certain.all(axis=1) & (cases.present.sum(axis=1) == 1)).sum() > 20


def test_the_name_is_asked_for_where_one_finding_is_there() -> None:
    cohort, cases = SPEC.build(), SPEC.cases()
    alone = np.flatnonzero((cases.present.sum(axis=1) == 1) & (cohort.labels != -1).all(axis=1))
    assert cohort.questions is not None
    for row, questions in zip(alone.tolist(), cohort.questions(alone), strict=True):
        (name,) = (question for question in questions if question.kind == NAME)
        assert name.answers == (FINDINGS[int(cases.present[row].argmax())].lower(),)


def test_questions_follow_their_rows() -> None:
    """Of a subset, and of a cohort built again."""
    cohort = SPEC.build()
    rows = np.array([31, 2])
    assert cohort.questions is not None
    taken = cohort.take(rows).questions
    assert taken is not None
    assert taken(np.array([1])) == cohort.questions(np.array([2])) == SPEC.build().questions(np.array([2]))  # type: ignore[misc]
