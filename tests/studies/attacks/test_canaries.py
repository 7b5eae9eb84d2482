"""Exposure of canaries: by hand, by chance, and of a phrase that is known by heart."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from studies.attacks.canaries import UNSEEN, WORDS, by_chance, exposure, exposures, phrases

pytestmark = pytest.mark.slow(seconds=2)


def test_exposure_by_hand() -> None:
    """Of K = 4 candidates the own phrase is first, third (2 - log2 3), and tied for the first rank (rank 1.5)."""
    film = torch.tensor([[1.0, 0], [1.0, 0], [0.0, 1.0]])
    own = torch.tensor([[1.0, 0], [0.6, 0.8], [0.0, 1.0]])
    others = torch.tensor([[0.8, 0.6], [0.96, 0.28], [0.0, 1.0]])
    bits = exposures(film, own, others)
    assert bits.tolist() == pytest.approx([2.0, 2 - math.log2(3), 2 - math.log2(1.5)])


def test_chance_is_the_mean_over_all_ranks() -> None:
    for candidates in [2, 16, 1024]:
        mean = sum(math.log2(candidates) - math.log2(rank) for rank in range(1, candidates + 1)) / candidates
        assert by_chance(candidates) == pytest.approx(mean)


def test_chance_goes_to_one_over_the_logarithm_of_two() -> None:
    assert by_chance(10**6) == pytest.approx(1 / math.log(2), abs=1e-4)


def test_what_nobody_trained_on_is_exposed_by_chance() -> None:
    """4,000 random films and phrases among 256 candidates: the deviation of one exposure is 1.4 bits."""
    generator = torch.Generator().manual_seed(0)
    film, own = (F.normalize(torch.randn(4000, 64, generator=generator), dim=1) for _ in range(2))
    others = F.normalize(torch.randn(255, 64, generator=generator), dim=1)
    found = exposure(UNSEEN, "north", exposures(film, own, others), 0.0, 256)
    assert found.mean.value == pytest.approx(by_chance(256), abs=0.1)
    assert found.mean.low < found.chance < found.mean.high
    assert found.largest <= found.most == 8


def test_phrases_are_random_and_the_seeds() -> None:
    words = [f"word{number}" for number in range(50)]
    drawn = phrases(200, words, 0)
    assert len(set(drawn)) == 200
    assert {len(phrase.split()) for phrase in drawn} == {WORDS}
    assert {word for phrase in drawn for word in phrase.split()} == set(words)
    assert phrases(200, words, 0) == drawn != phrases(200, words, 1)
