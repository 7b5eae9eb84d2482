"""The bootstrap over patients: patients are drawn whole, weights give the figures of the records drawn."""

from __future__ import annotations

import math

import pytest
import torch

from fedvlp.evaluation.classification import rank_sum_auc
from fedvlp.evaluation.intervals import area_of, bootstrap, difference, macro, mean_of, resampled


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
