"""Words read off an update, on rows made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from studies.attacks.one_update import recovered

pytestmark = pytest.mark.slow(seconds=1)


def test_an_update_that_left_the_rows_tells_nothing() -> None:
    """As the shipped policy sends it."""
    before = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    words = recovered("north", before, before.clone(), torch.tensor([[1, 2], [2, 3]]), 2, 1)
    assert (words.words, words.recovered, words.guess) == (3, 0.0, 6.0)
    assert math.isnan(words.right)


def test_the_shares_by_hand() -> None:
    """Words 1, 2, 3, 4 were read; rows 3, 4, 5 stand out: two of four, and two of three."""
    before = torch.ones(10, 4)
    after = before.clone()
    after[[3, 4, 5]] += 0.1
    words = recovered("north", before, after, torch.tensor([1, 2, 3, 4, 4]), 2, 7)
    assert (words.site, words.reports, words.steps, words.words) == ("north", 2, 7, 4)
    assert (words.recovered, words.right, words.guess) == (50.0, pytest.approx(200 / 3), 40.0)


def test_noise_makes_every_row_stand_out() -> None:
    before = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    after = before + 0.01 * torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    words = recovered("north", before, after, torch.arange(20), 5, 1)
    assert words.recovered == 100.0
    assert words.right == words.guess == 10.0
