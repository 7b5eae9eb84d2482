"""BCE by hand, its masks and its policies."""

from __future__ import annotations

import math

import pytest
import torch

from fedvlp.core.types import VLOutput
from fedvlp.objectives.bce import BCE, BCEConfig

nan = math.nan


def loss(objective: BCE, logits: list[list[float]], labels: list[list[float]]) -> float:
    return float(objective(VLOutput(logits=torch.tensor(logits)), {"labels": torch.tensor(labels)})["bce"])


def test_by_hand() -> None:
    """-log sigmoid(2) and -log(1 - sigmoid(-1)), averaged over the two known labels."""
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 2
    assert loss(BCE(), [[2.0, -1.0]], [[1.0, 0.0]]) == pytest.approx(expected)


def test_uncertain_and_blank_labels_are_masked() -> None:
    """Neither value nor gradient depends on a masked logit; the mean is over the known labels."""
    logits = torch.tensor([[2.0, 50.0], [-50.0, -1.0]], requires_grad=True)
    term = BCE()(VLOutput(logits=logits), {"labels": torch.tensor([[1.0, -1.0], [nan, 0.0]])})["bce"]
    term.backward()
    assert term.item() == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 2)
    assert logits.grad is not None
    assert logits.grad[0, 1] == logits.grad[1, 0] == 0
    assert logits.grad[0, 0] != 0


def test_the_mean_over_one_known_label_is_its_loss() -> None:
    assert loss(BCE(), [[2.0, 5.0]], [[1.0, nan]]) == pytest.approx(math.log1p(math.exp(-2)))


def test_a_batch_without_a_known_label_is_zero_and_connected() -> None:
    logits = torch.zeros(2, 1, requires_grad=True)
    term = BCE()(VLOutput(logits=logits), {"labels": torch.full((2, 1), nan)})["bce"]
    term.backward()
    assert term == 0
    assert torch.equal(logits.grad, torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("uncertain", "blank", "expected"),
    [
        ("ignore", "ignore", [1, 0, nan, nan]),
        ("zeros", "ignore", [1, 0, 0, nan]),
        ("ones", "zeros", [1, 0, 1, 0]),
        ("ignore", "zeros", [1, 0, nan, 0]),
    ],
)
def test_policies(uncertain: str, blank: str, expected: list[float]) -> None:
    """U-Ignore must not turn into a zero where blanks do."""
    seen = BCEConfig(uncertain, blank).build().targets(torch.tensor([[1.0, 0.0, -1.0, nan]]))
    torch.testing.assert_close(seen, torch.tensor([expected], dtype=torch.float32), equal_nan=True)


def test_refusals_and_absence() -> None:
    assert BCE()(VLOutput(), {"labels": torch.ones(1, 1)}) == {}
    with pytest.raises(ValueError, match=r"labels \[1, 2\], logits \[1, 1\]"):
        loss(BCE(), [[0.0]], [[1.0, 0.0]])
    for wrong in ({"uncertain": "maybe"}, {"blank": "ones"}):
        with pytest.raises(ValueError, match="BCE:"):
            BCEConfig(**wrong)
