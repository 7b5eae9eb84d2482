"""Paired differences, intervals, verdicts and preconditions, by hand."""

from __future__ import annotations

import math

import pytest

from fedvlp.claims.scenario import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Interval,
    Table,
    ahead,
    apart,
    apart_methods,
    at_least,
    interval,
)

CELLS = {
    ("a", 0): {"r": 10.0, "w": 4.0}, ("a", 1): {"r": 12.0, "w": 5.0}, ("a", 2): {"r": 20.0, "w": 6.0},
    ("b", 0): {"r": 9.0, "w": 5.0}, ("b", 1): {"r": 11.5, "w": 9.0}, ("b", 2): {"r": 18.0, "w": 1.0},
}  # fmt: skip
TABLE = Table(CELLS)


def test_differences_are_paired_by_seed() -> None:
    assert TABLE.values("a", "r") == [10.0, 12.0, 20.0]
    assert TABLE.difference("a", "b", "r") == [1.0, 0.5, 2.0]
    with pytest.raises(ValueError, match="no figure x of a with seed 0"):
        TABLE.values("a", "x")


def test_the_interval_is_that_of_the_paired_t_test() -> None:
    from scipy.stats import ttest_rel

    measured = interval(TABLE.difference("a", "b", "r"))
    expected = ttest_rel(TABLE.values("a", "r"), TABLE.values("b", "r")).confidence_interval(0.95)
    assert (measured.low, measured.high) == pytest.approx((expected.low, expected.high))
    assert measured.mean == pytest.approx(3.5 / 3)
    assert str(Interval(1.25, -0.5, 3.0)) == "+1.2 [-0.5, +3.0]"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [([1.0, 1.1, 0.9], HOLDS), ([-1.0, -1.1, -0.9], FAILS), ([1.0, -1.0, 0.5], UNDECIDED), ([5.0], UNDECIDED),
     ([1.0, 1.0], HOLDS), ([0.0, 0.0], UNDECIDED)],
)  # fmt: skip
def test_verdicts(differences: list[float], verdict: str) -> None:
    assert interval(differences).verdict == verdict


def test_one_seed_has_no_interval_and_none_no_mean() -> None:
    assert math.isnan(interval([1.0]).low)
    with pytest.raises(ValueError, match="no seed"):
        interval([])


def test_preconditions_by_hand() -> None:
    assert ahead("a", "b", "r").check(TABLE)  # 1.17 against a standard error of 0.44
    assert not ahead("b", "a", "r").check(TABLE)
    assert not ahead("b", "a", "w").check(TABLE)  # 0 of 2.9
    assert apart("a", "r", "w", 9.0).check(TABLE)
    assert not apart("a", "r", "w", 9.1).check(TABLE)
    assert apart_methods("a", "b", "r", 1.1).check(TABLE)
    assert not apart_methods("a", "b", "r", 1.2).check(TABLE)
    assert at_least("a", "r", 14.0).check(TABLE)
    assert not at_least("a", "r", 14.1).check(TABLE)
