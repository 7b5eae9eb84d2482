"""Intervals by hand: Student's t over paired seeds, and a bootstrap over patients that is the same for all models."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedvlp.evaluation.intervals import Bootstrap, Interval, of_draws, over_seeds


def test_the_interval_over_seeds_is_that_of_the_paired_t_test() -> None:
    from scipy.stats import ttest_rel

    ours, theirs = [10.0, 12.0, 20.0], [9.0, 11.5, 18.0]
    measured = over_seeds([a - b for a, b in zip(ours, theirs, strict=True)])
    expected = ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (measured.low, measured.high) == pytest.approx((expected.low, expected.high))
    assert measured.mean == pytest.approx(3.5 / 3)


def test_one_seed_has_no_interval_and_none_no_mean() -> None:
    assert math.isnan(over_seeds([1.0]).low)
    assert str(over_seeds([1.0])) == "+1.0"
    with pytest.raises(ValueError, match="no seed"):
        over_seeds([])


@pytest.mark.parametrize(
    ("low", "high", "side"), [(0.1, 2.0, 1), (-2.0, -0.1, -1), (-1.0, 1.0, 0), (0.0, 1.0, 0), (math.nan, math.nan, 0)]
)
def test_the_side_of_an_interval(low: float, high: float, side: int) -> None:
    assert Interval(0.5, low, high).side == side


def test_an_interval_as_text() -> None:
    assert str(Interval(1.25, -0.5, 3.0)) == "+1.2 [-0.5, +3.0]"
    assert Interval(12.25, 9.5, 13.0).unsigned() == "12.2 [9.5, 13.0]"


def test_patients_are_drawn_and_not_their_records() -> None:
    """Half of 100 records are right. One patient each: 50 +- 1.96 * 5. Of two patients only: 0, 50 or 100."""
    right = np.repeat([100.0, 0.0], 50)
    alone = of_draws(Bootstrap({"a": [f"p{index}" for index in range(100)]}).average({"a": right}))
    assert alone.mean == 50.0
    assert (alone.low, alone.high) == pytest.approx((50 - 1.96 * 5, 50 + 1.96 * 5), abs=1.1)
    drawn = Bootstrap({"a": ["p"] * 50 + ["q"] * 50}).average({"a": right})
    assert set(drawn) == {0.0, 50.0, 100.0}
    assert np.mean(drawn[1:] == 50.0) == pytest.approx(0.5, abs=0.05)


def test_a_patient_with_more_records_weighs_more_when_drawn() -> None:
    """Of p's one record and q's three: p twice 100, both once 25, q twice 0."""
    drawn = Bootstrap({"a": ["p", "q", "q", "q"]}).average({"a": np.array([100.0, 0.0, 0.0, 0.0])})
    assert set(drawn) == {100.0, 25.0, 0.0}


def test_average_and_worst_over_sites_by_hand() -> None:
    """Sites count alike whatever their size; the worst is the least one of each draw, not of one fixed site."""
    patients = {"a": ["p", "q"], "b": ["r"] * 6}
    figures = {"a": np.array([100.0, 0.0]), "b": np.full(6, 40.0)}
    bootstrap = Bootstrap(patients)
    average, worst = bootstrap.average(figures), bootstrap.worst(figures)
    assert (average[0], worst[0]) == (45.0, 40.0)
    assert set(average[1:]) == {20.0, 45.0, 70.0}
    assert set(worst[1:]) == {0.0, 40.0}


def test_differences_are_paired() -> None:
    """A model that is right wherever the other is, and once more, is ahead in every draw that holds that record."""
    bootstrap = Bootstrap({"a": [f"p{index}" for index in range(40)]})
    rng = np.random.default_rng(0)
    ours = rng.choice([0.0, 100.0], 40)
    same = of_draws(bootstrap.average({"a": ours}) - bootstrap.average({"a": ours.copy()}))
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)
    shifted = of_draws(bootstrap.average({"a": ours + 5}) - bootstrap.average({"a": ours}))
    assert (shifted.low, shifted.high) == pytest.approx((5.0, 5.0))


def test_draws_are_those_of_the_seed() -> None:
    patients, figures = {"a": [str(index) for index in range(30)]}, {"a": np.arange(30.0)}
    first, again, other = (Bootstrap(patients, 50, seed).average(figures) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert first[0] == other[0] == 14.5
    assert not np.array_equal(first, other)
