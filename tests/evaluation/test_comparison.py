"""DeLong's test against its definition and against the bootstrap, and Holm's adjustment by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedvlp.evaluation.classification import rank_sum_auc
from fedvlp.evaluation.intervals import components, delong, holm, midranks


def drawn(count: int = 60, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of two models that agree in part, with ties, and the truth; one record in three is positive."""
    generator = torch.Generator().manual_seed(seed)
    truth = (torch.arange(count) % 3 == 0).double()
    shared = torch.randn(count, generator=generator)
    one, other = (shared + torch.randn(count, generator=generator) + strength * truth for strength in (1.5, 0.7))
    return one.mul(2).round().double(), other.mul(2).round().double(), truth


def kernel(positive: float, negative: float) -> float:
    return 1.0 if positive > negative else 0.5 if positive == negative else 0.0


def by_definition(one: Tensor, other: Tensor, truth: Tensor) -> float:
    """Variance of the difference: DeLong, 1988, eq. 5 to 7, every positive with every negative."""
    total = 0.0
    for side in (1.0, 0.0):
        rows = []
        for scores in (one, other):
            own, opposite = scores[truth == side].tolist(), scores[truth != side].tolist()
            pairs = [[kernel(a, b) if side else kernel(b, a) for b in opposite] for a in own]
            rows.append(torch.tensor(pairs).double().mean(dim=1))
        covariance = torch.cov(torch.stack(rows))
        total += float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]) / len(rows[0])
    return total


def test_delong_is_its_definition() -> None:
    for seed in range(4):
        one, other, truth = drawn(seed=seed)
        found = delong(one, other, truth)
        assert found.one == pytest.approx(rank_sum_auc(one, truth))
        assert found.other == pytest.approx(rank_sum_auc(other, truth))
        assert found.variance == pytest.approx(by_definition(one, other, truth))


def test_areas_and_ranks_are_those_of_sklearn_and_scipy() -> None:
    from scipy.stats import norm, rankdata
    from sklearn.metrics import roc_auc_score

    one, other, truth = drawn()
    found = delong(one, other, truth)
    assert (found.one, found.other) == pytest.approx((roc_auc_score(truth, one), roc_auc_score(truth, other)))
    assert midranks(one).tolist() == rankdata(one).tolist()
    assert found.p == pytest.approx(2 * norm.sf(abs(found.difference) / math.sqrt(found.variance)))


def test_the_components_of_three_records_by_hand() -> None:
    """Positives 3 and 1, negatives 1 and 0: 3 beats both, 1 ties one and beats the other."""
    v10, v01 = components(torch.tensor([3.0, 1.0, 1.0, 0.0]), torch.tensor([1, 1, 0, 0]))
    assert v10.tolist() == [1.0, 0.75]
    assert v01.tolist() == [0.75, 1.0]


def test_the_variance_is_that_of_the_bootstrap() -> None:
    from fedvlp.evaluation.intervals import area_of, difference, resampled

    one, other, truth = drawn(300)
    apart = difference(area_of(one, truth), area_of(other, truth))
    values = torch.cat([apart(times) for times in resampled(list(range(300)), 2000, 0)])
    assert delong(one, other, truth).variance == pytest.approx(float(values.var()), rel=0.15)


def test_equal_models_do_not_differ_and_opposite_ones_do() -> None:
    one, _, truth = drawn()
    assert delong(one, 3 * one + 1, truth).p == 1.0
    assert math.isnan(delong(truth, -truth, truth).p), "no variance, so nothing to judge the difference by"
    assert delong(one, -one, truth).p < 0.01


def test_four_records_make_nothing_certain() -> None:
    """One model ranks all four right, the other cannot tell any: p was 0, whatever the number of records."""
    found = delong(torch.tensor([0.9, 0.8, 0.1, 0.2]), torch.full((4,), 0.5), torch.tensor([1, 1, 0, 0]))
    assert (found.difference, found.variance) == (0.5, 0.0)
    assert math.isnan(found.p)


def test_under_the_null_p_is_uniform() -> None:
    """150 pairs of equally good models: as many below each level as the level says."""
    small = []
    for seed in range(150):
        generator = torch.Generator().manual_seed(seed)
        truth = (torch.arange(80) % 2).double()
        one, other = (torch.randn(80, generator=generator) + truth for _ in range(2))
        small.append(delong(one, other, truth).p)
    shares = [sum(p < level for p in small) / 150 for level in (0.05, 0.5)]
    assert shares == pytest.approx([0.05, 0.5], abs=0.08)


def test_refuses_what_cannot_be_compared() -> None:
    one, other, truth = drawn()
    for wrong in ((one[1:], other, truth), (one, other, torch.ones(60)), (one, other, truth * math.nan)):
        with pytest.raises(ValueError, match="delong"):
            delong(*wrong)


def test_holm_by_hand() -> None:
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1; the last may not fall below the one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([math.nan, 0.01, 0.04]) == pytest.approx([math.nan, 0.02, 0.04], nan_ok=True), "two of these count"
