"""Membership by representations: the map that is guessed, and what it tells of a site that learned few directions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedvlp.evaluation.audit.membership import guessed, guessed_cosines


def drawn(count: int, seed: int, size: int = 8) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).double()


def test_a_linear_site_is_guessed() -> None:
    """Up to the ridge: a hundredth of the variance, so about a hundredth of the length."""
    turn, shift = drawn(8, 0), drawn(1, 1)
    known, own = drawn(500, 2), drawn(20, 3)
    found = guessed(known, known @ turn + shift, own)
    assert found.shape == (20, 8)
    assert float((found - (own @ turn + shift)).norm() / (own @ turn).norm()) < 0.03


def test_records_in_the_directions_that_a_site_learned_are_told() -> None:
    """Its model makes film and report alike along the first half of the directions, in which its own records lie."""
    known = {"image": drawn(400, 0), "text": drawn(400, 1)}
    turned = known["text"][:, 4:] @ torch.linalg.qr(drawn(4, 2, size=4))[0]
    sent = {"image": known["image"], "text": torch.cat([known["text"][:, :4], turned], dim=1)}
    half = torch.cat([torch.ones(4), torch.zeros(4)]).double()
    members, others = drawn(50, 3) * half, drawn(50, 4) * (1 - half)
    both = torch.cat([members, others])
    scores = guessed_cosines(known, sent, {"image": both, "text": both})
    assert float(scores[:50].mean()) > 0.95
    assert float(scores[50:].mean()) < 0.7


def test_a_site_that_answers_with_noise_tells_nothing() -> None:
    known = {"image": drawn(400, 0), "text": drawn(400, 1)}
    sent = {"image": drawn(400, 5), "text": drawn(400, 6)}
    own = drawn(200, 7)
    scores = guessed_cosines(known, sent, {"image": own, "text": own})
    assert float(scores.mean()) == pytest.approx(0, abs=0.3)
