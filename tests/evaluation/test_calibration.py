"""The expected calibration error by hand, and of probabilities that are true."""

from __future__ import annotations

import pytest
import torch

from fedvlp.evaluation.linear_probe import calibration_error


def test_by_hand() -> None:
    """Two bins: 0.2 and 0.4 with one of two (gap 0.2), 0.9 that did not happen (gap 0.9); (2 * 0.2 + 0.9) / 3."""
    found = calibration_error(torch.tensor([0.2, 0.4, 0.9]), torch.tensor([1, 0, 0]), bins=2)
    assert found == pytest.approx((2 * 0.2 + 0.9) / 3)


def test_gaps_within_a_bin_cancel_and_between_bins_do_not() -> None:
    stated, happened = torch.tensor([0.25, 0.25, 0.75, 0.75]), torch.tensor([1, 1, 0, 0])
    assert calibration_error(stated, happened, bins=1) == pytest.approx(0.0)
    assert calibration_error(stated, happened, bins=2) == pytest.approx(0.75)


def test_the_edges_are_in_a_bin() -> None:
    assert calibration_error(torch.tensor([0.0, 1.0]), torch.tensor([0, 1])) == 0.0
    assert calibration_error(torch.tensor([0.5, 0.501]), torch.tensor([1, 0]), bins=2) == pytest.approx(0.5005)


def test_true_probabilities_have_a_small_error_and_certain_ones_a_large() -> None:
    generator = torch.Generator().manual_seed(0)
    stated = torch.rand(20_000, generator=generator)
    happened = (torch.rand(20_000, generator=generator) < stated).float()
    assert calibration_error(stated, happened) < 0.02
    assert calibration_error((stated > 0.5).float(), happened) == pytest.approx(0.25, abs=0.02)


def test_refuses_no_record() -> None:
    with pytest.raises(ValueError, match="calibration"):
        calibration_error(torch.empty(0), torch.empty(0))
