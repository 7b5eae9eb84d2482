"""Words read off an update, on rows made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedvlp.evaluation.audit.one_update import recovered, standing_out


def test_rows_that_changed_otherwise_than_by_the_decay_stand_out() -> None:
    """However little they moved, down to a tenth of a step of AdamW; the others' rounding is none."""
    for dtype in [torch.float32, torch.float64]:
        for decay in [0.0, 2.5e-5, 0.3]:
            before = torch.randn(500, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
            before[7] = 0
            after = before * (1 - decay)
            moved = [3, 7, 99, 400]
            after[moved] += 5e-5 * torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
            assert standing_out(before, after).nonzero()[:, 0].tolist() == moved


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
