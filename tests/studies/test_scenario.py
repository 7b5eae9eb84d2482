"""Paired differences, intervals, verdicts and preconditions, by hand."""

from __future__ import annotations

import pytest

from fedvlp.evaluation.intervals import over_seeds
from studies.claims.cell_results import Made, NotRunError, Table, UnlikeError, alike
from studies.claims.scenario import (
    FAILS,
    HOLDS,
    UNDECIDED,
    ahead,
    apart,
    apart_methods,
    at_least,
    at_most,
    p_value,
    verdict,
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


def test_verdicts() -> None:
    """Two seeds that agree to the last digit have no deviation; one seed decides nothing."""
    for differences, expected in [
        ([1.0, 1.1, 0.9], HOLDS), ([-1.0, -1.1, -0.9], FAILS), ([1.0, -1.0, 0.5], UNDECIDED), ([5.0], UNDECIDED),
        ([1.0, 1.0], HOLDS), ([0.0, 0.0], UNDECIDED),
    ]:  # fmt: skip
        assert verdict(over_seeds(differences)) == expected


def test_p_value_agrees_with_the_interval() -> None:
    """t = sqrt(12) with 2 degrees of freedom, whose p is 1 - t / sqrt(2 + t^2); one seed shows nothing."""
    assert p_value([1.0, 2.0, 3.0]) == pytest.approx(1 - 12**0.5 / (2 + 12) ** 0.5)
    assert p_value([1.0, 1.0]) == 0.0
    assert p_value([0.0, 0.0]) == 1.0
    assert p_value([5.0]) is None


def test_seeds_that_one_of_both_has_not_finished_are_left_out() -> None:
    """A ledger that was stopped is judged by the seeds that both methods have; without one it says so."""
    table = Table({cell: figures for cell, figures in CELLS.items() if cell != ("b", 1)})
    assert table.difference("a", "b", "r") == [1.0, 2.0]
    assert table.values("a", "r") == [10.0, 12.0, 20.0]
    with pytest.raises(NotRunError, match="no seed with which a and c have finished"):
        table.difference("a", "c", "r")


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
    assert at_most("a", "r", 14.0).check(TABLE)
    assert not at_most("a", "r", 13.9).check(TABLE)
    assert ahead("a", "b", "r", "w").check(TABLE)  # 5, 3 and 19: 9 against 5
    assert not ahead("b", "a", "w", "r").check(TABLE)


def ran(device: str = "cpu", version: str = "2.15", recall: float = 4.5, begins: object = "layer") -> Made:
    return Made(device, version, begins, {"r": recall})


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (ran(), True),
        (ran(recall=4.5009), True),
        (ran(recall=4.502), False),
        (ran("NVIDIA H200"), False),
        (ran(version="2.11"), False),
        (ran(recall=2.0, begins="batch"), True),
        (ran("NVIDIA H200", begins="batch"), False),
        (Made("cpu", "2.15", "layer", {}), True),
    ],
)
def test_runs_are_alike_on_one_torch_and_device_from_one_start(other: Made, expected: bool) -> None:
    """Less than a thousandth of a point is rounding; other models by their settings measure otherwise before training.

    A run that nothing was measured of before training is taken by its machine alone.
    """
    assert alike(ran(), other) == alike(other, ran()) == expected


def test_a_pair_of_unlike_runs_is_left_out_and_without_another_there_is_no_difference() -> None:
    """Seed 1 of b began otherwise: 1 and 2 remain. All of c ran on a GPU: no seed does."""
    made = {cell: ran(recall=9.0) if cell == ("b", 1) else ran() for cell in CELLS}
    cells = CELLS | {("c", seed): {"r": 1.0} for seed in range(3)}
    table = Table(cells, made=made | {("c", seed): ran("NVIDIA H200") for seed in range(3)})
    assert table.difference("a", "b", "r") == [1.0, 2.0]
    assert table.paired_seeds("a", "b") == [0, 2]
    assert table.difference("b", "b", "r", "w") == [4.0, 2.5, 17.0], "two figures of one run"
    with pytest.raises(
        UnlikeError, match="a and c have finished with seeds 0, 1, 2, and with none of them on one torch"
    ):
        table.difference("a", "c", "r")
    with pytest.raises(UnlikeError):
        table.of_seeds(lambda seed: seed == 1).difference("a", "b", "r")
    with pytest.raises(NotRunError, match="run them first"):
        table.difference("a", "d", "r")


def test_what_ran_at_two_places_is_paired_at_each() -> None:
    """a ran here and there, b there and c here: each difference is of one place, the mean of a that of here."""
    here, there = {cell: ran() for cell in CELLS}, {cell: ran("NVIDIA H200") for cell in CELLS}
    at_home = {("a", 0): {"r": 10.0}, ("c", 0): {"r": 1.0}}
    elsewhere = Table({("a", 0): {"r": 20.0}, ("b", 0): {"r": 5.0}}, made=there)
    table = Table(at_home, made=here | {("c", 0): ran()}, elsewhere=elsewhere)
    assert table.values("a", "r") == [10.0]
    assert table.values("b", "r") == [5.0]
    assert table.difference("a", "c", "r") == [9.0]
    assert table.difference("a", "b", "r") == table.of_seeds(lambda _: True).difference("a", "b", "r") == [15.0]
    with pytest.raises(UnlikeError):
        table.difference("c", "b", "r")
