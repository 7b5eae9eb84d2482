"""Learning rates over rounds, by hand."""

from __future__ import annotations

import pytest

from fedvlp.core.optimizers import cosine


def test_the_cosine_by_hand() -> None:
    assert [cosine(round, 4) for round in range(6)] == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0, 0])


def test_no_rounds_are_no_schedule() -> None:
    assert [cosine(round, 0) for round in (0, 1, 100)] == [1.0, 1.0, 1.0]
