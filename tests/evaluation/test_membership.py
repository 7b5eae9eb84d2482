"""Membership inference: scores, matching and rates by hand, and the bound that epsilon leaves."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fedvlp.evaluation.audit.membership import (
    COSINE,
    LOSS,
    TEMPERATURE,
    label_scores,
    largest_area,
    largest_rate,
    matching_weights,
    membership,
    pair_scores,
    rate_at,
    standardised,
)


def test_scores_of_a_pair_by_hand() -> None:
    """Two reference pairs; the loss is CLIP's, of both directions, with the own pair and these."""
    unit = torch.eye(4, dtype=torch.float64)
    image, text = F.normalize(unit[:1] + 0.5 * unit[1:2]), unit[:1]
    others = unit[1:3], unit[2:4]
    scores = pair_scores(image, text, others)
    cosine = 1 / math.sqrt(1.25)
    assert float(scores[COSINE]) == pytest.approx(cosine)
    of_image = math.exp(cosine / TEMPERATURE) / (math.exp(cosine / TEMPERATURE) + 2)  # both other texts at 0
    of_text = math.exp(cosine / TEMPERATURE) / (math.exp(cosine / TEMPERATURE) + 2)
    assert float(scores[LOSS]) == pytest.approx((math.log(of_image) + math.log(of_text)) / 2)


def test_scores_of_a_classifier_are_of_known_labels() -> None:
    logits = torch.tensor([[2.0, -1.0, 5.0], [0.0, 0.0, 0.0]])
    labels = torch.tensor([[1.0, 0.0, math.nan], [-1.0, math.nan, -1.0]])
    scores = label_scores(logits, labels)[LOSS]
    by_hand = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 2
    assert scores.tolist() == pytest.approx([-by_hand, 0.0])


def test_members_are_weighted_as_the_others_lie() -> None:
    """Stratum a: 3 members and 1 other; b: 1 and 2; c has members alone, d others alone: they do not count."""
    strata = list("aaaabbbcd")
    member = torch.tensor([1, 1, 1, 0, 1, 0, 0, 1, 0], dtype=torch.bool)
    weights = matching_weights(strata, member)
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1, 2, 1, 1, 0, 0])
    for stratum in "ab":
        here = torch.tensor([name == stratum for name in strata])
        assert float(weights[here & member].sum()) == pytest.approx(float(weights[here & ~member].sum()))


def test_what_only_tells_strata_apart_is_no_membership() -> None:
    """The published figures' fault: long reports score higher, and most members are long. Matched, it is a coin."""
    generator = torch.Generator().manual_seed(0)
    longer = torch.rand(4000, generator=generator) < 0.5
    member = torch.rand(4000, generator=generator) < torch.where(longer, 0.8, 0.2)
    scores = longer.double() * 3 + torch.randn(4000, generator=generator).double()
    patients = list(range(4000))
    unmatched = membership("m", "a", "", scores, member, torch.ones(4000).double(), patients, 50)
    matched = membership("m", "a", "", scores, member, matching_weights(longer.tolist(), member), patients, 50)
    assert unmatched.area.value > 70
    assert matched.area.low < 50 < matched.area.high
    assert abs(matched.area.value - 50) < 3


def test_a_patients_second_record_makes_no_interval_narrower() -> None:
    """Every record twice, of the same patient: the same figures with the same intervals."""
    generator = torch.Generator().manual_seed(0)
    scores, member = torch.rand(60, generator=generator), torch.arange(60) % 2 == 0
    once, twice = (
        membership("m", "a", "", scores.repeat(n), member.repeat(n), torch.ones(60 * n), [*range(60)] * n, 50)
        for n in (1, 2)
    )
    for one, other in zip((once.area, *once.rates), (twice.area, *twice.rates), strict=True):
        assert vars(other) == pytest.approx(vars(one))


def test_a_sites_scale_is_no_evidence() -> None:
    """Site b scores higher by 10; after standardising, both have mean 0 and deviation 1 of both sides alike."""
    sites = ["a"] * 4 + ["b"] * 4
    member = torch.tensor([1, 1, 0, 0] * 2, dtype=torch.bool)
    scores = torch.tensor([1.0, 2, 3, 4, 11, 12, 13, 14]).double()
    of = standardised(scores, member, torch.ones(8).double(), sites)
    assert of[:4].tolist() == pytest.approx(of[4:].tolist())
    assert float(of[:4].mean()) == pytest.approx(0)
    assert float(of[:4].square().mean()) == pytest.approx(1)


def test_the_rate_at_few_false_positives_by_hand() -> None:
    """Scores 9 8 | 7 | 6 | 5: members are 9, 8 and 6; of two others one is 7. Equal scores are flagged together."""
    scores = torch.tensor([9.0, 8, 7, 6, 5])
    member = torch.tensor([1, 1, 0, 1, 0], dtype=torch.bool)
    once = torch.ones(1, 5, dtype=torch.float64)
    assert float(rate_at(scores, member, 0.0)(once)) == pytest.approx(2 / 3)
    assert float(rate_at(scores, member, 0.5)(once)) == pytest.approx(1)
    tied = torch.tensor([9.0, 9, 9, 1, 1])
    assert float(rate_at(tied, member, 0.0)(once)) == 0.0


def test_the_bound_of_epsilon_is_where_its_two_lines_meet() -> None:
    """The area by the trapezoid rule over the rates; at epsilon 0 and delta 0 nothing is learned."""
    for epsilon in [0.0, 0.5, 1.0, 3.0, 8.0, 1000.0]:
        delta = 1e-5
        grid = torch.linspace(0, 1, 20_001, dtype=torch.float64)
        rates = torch.tensor([largest_rate(float(x), epsilon, delta) for x in grid])
        assert torch.all(rates.diff() >= -1e-12)
        assert torch.all((rates >= grid - 1e-12) & (rates <= 1))
        assert largest_area(epsilon, delta) == pytest.approx(float(torch.trapezoid(rates, grid)), abs=2e-4)
        assert largest_rate(0.01, epsilon, delta) <= math.exp(min(epsilon, 50)) * 0.01 + delta + 1e-12


def test_epsilon_0_leaves_a_coin() -> None:
    assert largest_area(0.0, 0.0) == pytest.approx(0.5)
    assert largest_rate(0.3, 0.0, 0.0) == pytest.approx(0.3)
