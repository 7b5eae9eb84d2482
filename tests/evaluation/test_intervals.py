"""Intervals by hand: Student's t over paired seeds; patients are drawn whole, and the same for all models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedvlp.evaluation.classification import rank_sum_auc
from fedvlp.evaluation.intervals import (
    Bootstrap,
    Interval,
    area_of,
    bootstrap,
    difference,
    macro,
    mean_of,
    of_draws,
    of_worst,
    over_seeds,
    resampled,
)


def test_a_resample_draws_as_many_patients_and_each_with_all_records() -> None:
    patients = ["a", "b", "b", "c", "c", "c", "d"]
    (weights,) = resampled(patients, 500, 3)
    of_patient = weights[:, [0, 1, 3, 6]]
    assert torch.equal(of_patient.sum(1), torch.full((500,), 4.0).double())
    assert torch.equal(weights[:, 1], weights[:, 2])
    assert torch.equal(weights[:, 3], weights[:, 5])
    assert float(of_patient.mean()) == pytest.approx(1.0)
    assert len(of_patient.unique(dim=0)) > 30


def test_chunks_are_one_stream_of_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    figure, patients = mean_of(torch.arange(9.0)), [str(n // 2) for n in range(9)]
    whole = bootstrap(figure, patients, 200, 5)
    monkeypatch.setattr("fedvlp.evaluation.intervals.AT_ONCE", 9 * 7)
    assert len(list(resampled(patients, 200, 5))) == 29
    parts = bootstrap(figure, patients, 200, 5)
    assert parts.value == whole.value
    assert parts.low == pytest.approx(whole.low, abs=0.6)
    assert parts == bootstrap(figure, patients, 200, 5) != bootstrap(figure, patients, 200, 6)


def test_the_interval_of_a_mean_is_that_of_theory() -> None:
    """400 patients of one record: 1.96 deviations of the mean to each side. Doubled records tell nothing new."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    found = bootstrap(mean_of(values), list(range(400)), 4000)
    reach = 1.96 * float(values.std(correction=0)) / 20
    assert found.value == pytest.approx(float(values.mean()))
    assert (found.high - found.low) / 2 == pytest.approx(reach, rel=0.06)
    twice = bootstrap(mean_of(values.repeat(2)), [*range(400), *range(400)], 4000)
    assert (twice.high - twice.low) / 2 == pytest.approx(reach, rel=0.06)


def test_weights_give_the_area_of_records_that_are_repeated() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(6, (40,), generator=generator).double()  # many ties
    truth = torch.randint(2, (40,), generator=generator).double()
    truth[3] = math.nan
    times = torch.randint(4, (3, 40), generator=generator).double()
    for row, area in zip(times, area_of(scores, truth)(times), strict=True):
        index = torch.arange(40).repeat_interleave(row.long())
        index = index[~truth[index].isnan()]
        assert float(area) == pytest.approx(rank_sum_auc(scores[index], truth[index]))


def test_scores_that_are_no_numbers_have_no_area() -> None:
    truth = torch.tensor([0.0, 1.0, math.nan])
    with pytest.raises(ValueError, match="auc: 1 of 2 scores are nan"):
        area_of(torch.tensor([0.5, math.nan, 0.5]), truth)
    assert float(area_of(torch.tensor([0.5, 0.6, math.nan]), truth)(torch.ones(1, 3).double())) == 1.0


def test_a_resample_without_a_class_has_no_area_and_is_left_out() -> None:
    """Three patients, one positive: 8 of 27 resamples lack him, and in all others the area is 1."""
    found = bootstrap(area_of(torch.tensor([0.9, 0.1, 0.2]), torch.tensor([1.0, 0.0, 0.0])), ["a", "b", "c"], 200)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
    times = torch.tensor([[0.0, 1.0, 2.0]]).double()
    assert area_of(torch.tensor([0.9, 0.1, 0.2]), torch.tensor([1.0, 0.0, 0.0]))(times).isnan().all()


def test_means_by_hand() -> None:
    times = torch.tensor([[1.0, 2.0, 0.0]]).double()
    first = mean_of(torch.tensor([3.0, 6.0, 100.0]))
    masked = mean_of(torch.tensor([3.0, math.nan, 100.0]), torch.tensor([1, 0, 1]))
    assert float(first(times)) == 5.0
    assert float(masked(times)) == 3.0
    assert float(macro([first, masked])(times)) == 4.0
    assert float(difference(first, masked)(times)) == 2.0
    undefined = mean_of(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0, 0, 1]))
    assert float(macro([first, undefined])(times)) == 5.0


def test_one_patient_has_no_interval_and_none_no_figure() -> None:
    found = bootstrap(mean_of(torch.tensor([1.0, 2.0])), ["a", "a"])
    assert (found.value, math.isnan(found.low), math.isnan(found.high)) == (1.5, True, True)
    with pytest.raises(ValueError, match="no record"):
        bootstrap(mean_of(torch.empty(0)), [])


def test_the_interval_over_seeds_is_that_of_the_paired_t_test() -> None:
    from scipy.stats import ttest_rel

    ours, theirs = [10.0, 12.0, 20.0], [9.0, 11.5, 18.0]
    measured = over_seeds([a - b for a, b in zip(ours, theirs, strict=True)])
    expected = ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (measured.low, measured.high) == pytest.approx((expected.low, expected.high))
    assert measured.value == pytest.approx(3.5 / 3)


def test_the_interval_over_overlapping_splits_is_the_corrected_resampled_one() -> None:
    """SD 2 over 4 splits that train on four times what they test: 2 sqrt(1/4 + 1/4), not 2 / sqrt(4); t is 3.1824."""
    differences = [1.0, 1.0, 4.0, 4.0]
    scale = 3**0.5 / 2  # of the sample's SD, sqrt(3), to 2
    plain, corrected = over_seeds(differences), over_seeds(differences, splits=71 / 284)
    assert plain.high - 2.5 == pytest.approx(3.18245 * scale * 2 / 2, rel=1e-5)
    assert corrected.high - 2.5 == pytest.approx(3.18245 * scale * 2 * 0.5**0.5, rel=1e-5)
    assert (corrected.value, 2.5 - corrected.low) == pytest.approx((2.5, corrected.high - 2.5))
    with pytest.raises(ValueError, match=r"splits is -0\.1; expected tested records over trained ones"):
        over_seeds(differences, splits=-0.1)


def test_one_seed_has_no_interval_and_none_no_mean() -> None:
    assert math.isnan(over_seeds([1.0]).low)
    assert str(over_seeds([1.0])) == "+1.0"
    with pytest.raises(ValueError, match="no seed"):
        over_seeds([])


def test_the_side_of_an_interval() -> None:
    for low, high, side in [(0.1, 2.0, 1), (-2.0, -0.1, -1), (-1.0, 1.0, 0), (0.0, 1.0, 0), (math.nan, math.nan, 0)]:
        assert Interval(0.5, low, high).side == side


def test_an_interval_as_text() -> None:
    assert str(Interval(1.25, -0.5, 3.0)) == "+1.2 [-0.5, +3.0]"
    assert Interval(12.25, 9.5, 13.0).unsigned() == "12.2 [9.5, 13.0]"
    assert Interval(0.123, 0.045, 1.0).unsigned(2) == "0.12 [0.04, 1.00]"


def test_a_bound_beside_0_shows_its_sign() -> None:
    """-1.1 [-2.1, -0.0] would not say whether the interval leaves 0 out, which decides the verdict."""
    assert str(Interval(-1.1, -2.1, -0.04)) == "-1.1 [-2.1, -0.04]"
    assert str(Interval(1.1, 0.0003, 2.1)) == "+1.1 [+0.0003, +2.1]"
    assert str(Interval(-1.1, -2.1, -0.0)) == "-1.1 [-2.1, +0.0]"
    assert str(Interval(1.1, 0.0, 2.1)) == "+1.1 [+0.0, +2.1]"


def test_patients_are_drawn_and_not_their_records() -> None:
    """Half of 100 records are right. One patient each: 50 +- 1.96 * 5. Of two patients only: 0, 50 or 100."""
    right = np.repeat([100.0, 0.0], 50)
    alone = of_draws(Bootstrap({"a": [f"p{index}" for index in range(100)]}).average({"a": right}))
    assert alone.value == 50.0
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
    patients = {"a": ["p", "q"], "b": ["r", "s"] * 3}
    figures = {"a": np.array([100.0, 0.0]), "b": np.full(6, 40.0)}
    drawn = Bootstrap(patients)
    average, worst = drawn.average(figures), drawn.worst(figures)
    assert (average[0], worst[0]) == (45.0, 40.0)
    assert set(average[1:]) == {20.0, 45.0, 70.0}
    assert set(worst[1:]) == {0.0, 40.0}


def test_sites_are_drawn_one_by_one() -> None:
    """Where two sites have as many patients, one may draw its better one twice and the other each once."""
    patients = {site: ["p", "q"] for site in "ab"}
    average = Bootstrap(patients).average({site: np.array([100.0, 0.0]) for site in "ab"})
    assert set(average) == {0.0, 25.0, 50.0, 75.0, 100.0}


def test_the_interval_of_a_worst_site_is_reflected_at_the_figure() -> None:
    """Draws 0, 1, ..., 40 of a worst site at 30: percentiles 1 and 39, reflected 60 - 39 = 21 and 60 - 1 = 59.

    At 50 all draws lie below: 1 to 39 and 61 to 99, and all between. At 60 what is above 100 is cut, at 10 what is
    below 0: 1 to 39 and 20 - 39 = -19 to 19; of a difference it is not. Of draws that are nan there are no bounds.
    """
    draws = np.arange(41.0)
    assert bounds(of_worst(np.array([30.0, *draws]))) == (30, 1, 59)
    assert bounds(of_worst(np.array([50.0, *draws]))) == (50, 1, 99)
    assert bounds(of_worst(np.array([60.0, *draws]))) == (60, 1, 100)
    assert bounds(of_worst(np.array([10.0, *draws]))) == (10, 0, 39)
    assert bounds(of_worst(np.array([10.0, *draws]), -100.0)) == (10, -19, 39)
    none = of_worst(np.full(42, math.nan))
    assert math.isnan(none.low)
    assert math.isnan(none.high)


def bounds(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def test_the_interval_of_a_worst_site_holds_the_truth_and_its_own_value() -> None:
    """Five sites of 64 pairs, half of them right: percentiles hold the truth, 50, in 4 of 10 trials.

    With three tenths right at one site, the basic interval alone holds the truth, 30, in 5 of 6. Of 100 trials the
    interval must hold the one in 80 and the other in 90, and always the value.
    """
    rng = np.random.default_rng(0)
    for least, trials in ((0.5, 80), (0.3, 90)):
        covered = 0
        for trial in range(100):
            sites = {str(site): 100.0 * (rng.random(64) < (0.5 if site else least)) for site in range(5)}
            patients = {site: [str(index) for index in range(64)] for site in sites}
            worst = of_worst(Bootstrap(patients, 200, trial).worst(sites))
            assert worst.low <= worst.value <= worst.high
            covered += worst.low <= 100 * least <= worst.high
        assert covered >= trials, least


def test_one_patient_at_a_site_has_no_interval() -> None:
    """Five records of one patient: whoever is drawn, it is him, which says nothing of other patients.

    Nor do a mean and a minimum over that site and another then.
    """
    drawn = Bootstrap({"a": ["p"] * 5, "b": ["q", "r"]})
    figures = {"a": np.full(5, 50.0), "b": np.array([0.0, 100.0])}
    alone, other = (of_draws(values) for values in drawn.by_site(figures))
    for interval in (alone, of_draws(drawn.average(figures)), of_worst(drawn.worst(figures))):
        assert interval.value == 50.0
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
        assert interval.side == 0
    assert (other.low, other.high) == (0.0, 100.0)
    assert (str(alone), alone.unsigned()) == ("+50.0", "50.0")


def test_differences_are_paired() -> None:
    """A model that is right wherever the other is, and once more, is ahead in every draw that holds that record."""
    drawn = Bootstrap({"a": [f"p{index}" for index in range(40)]})
    rng = np.random.default_rng(0)
    ours = rng.choice([0.0, 100.0], 40)
    same = of_draws(drawn.average({"a": ours}) - drawn.average({"a": ours.copy()}))
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    shifted = of_draws(drawn.average({"a": ours + 5}) - drawn.average({"a": ours}))
    assert (shifted.low, shifted.high) == pytest.approx((5.0, 5.0))


def test_draws_are_those_of_the_seed() -> None:
    patients, figures = {"a": [str(index) for index in range(30)]}, {"a": np.arange(30.0)}
    first, again, other = (Bootstrap(patients, 50, seed).average(figures) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert first[0] == other[0] == 14.5
    assert not np.array_equal(first, other)
