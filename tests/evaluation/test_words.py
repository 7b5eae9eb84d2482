"""Rows of a word embedding that an update gives away, made by hand."""

from __future__ import annotations

import torch

from fedvlp.evaluation.audit.one_update import standing_out


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
