"""Gradients of single records out of one backward pass, beside the gradients that autograd has of each alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.types import Batch
from fedvlp.evaluation.audit.gradients import directions

LAYERS = ("tokens", "twice", "last")


class Small(nn.Module):
    """Linear layers over tokens and over records, one of them called twice, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.tokens = nn.Linear(3, 3), nn.Linear(3, 4)
        self.twice, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, 3] -> [B, 2]"""
        pooled = torch.tanh(self.tokens(self.frozen(x))).mean(dim=1)
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(pooled)))))

    def weights(self) -> dict[str, Tensor]:
        return {f"{name}.weight": getattr(self, name).weight for name in LAYERS}


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def batches() -> list[Batch]:
    x = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, 1, 0, 1])
    return [{"x": x[:3], "y": y[:3]}, {"x": x[3:], "y": y[3:]}]


def test_lengths_and_products_are_those_of_each_record_alone() -> None:
    model = Small()
    change = {name: torch.randn_like(weight) for name, weight in model.weights().items()}
    found = directions(model, batches(), lambda batch: losses(model, batch), change)
    records = [{k: v[i : i + 1] for k, v in batch.items()} for batch in batches() for i in range(len(batch["y"]))]
    for index, record in enumerate(records):
        weights = model.weights()
        alone = torch.autograd.grad(losses(model, record).sum(), list(weights.values()))
        length = sum(float(one.square().sum()) for one in alone) ** 0.5
        product = sum(float((one * change[name]).sum()) for name, one in zip(weights, alone, strict=True))
        assert float(found.length[index]) == pytest.approx(length, rel=1e-5)
        assert float(found.product[index]) == pytest.approx(product, rel=1e-4, abs=1e-6)
    assert found.change == pytest.approx(sum(float(c.square().sum()) for c in change.values()) ** 0.5, rel=1e-6)
    assert torch.equal(found.shortness(), -found.length)


def test_a_step_on_a_record_goes_against_its_gradient() -> None:
    """Alignment 1 for the one record that a plain step was taken on."""
    model = Small()
    (batch, _) = batches()
    one = {name: tensor[:1] for name, tensor in batch.items()}
    weights = model.weights()
    step = torch.autograd.grad(losses(model, one).sum(), list(weights.values()))
    change = {name: -0.1 * gradient for name, gradient in zip(weights, step, strict=True)}
    aligned = directions(model, [batch], lambda part: losses(model, part), change).alignment()
    assert float(aligned[0]) == pytest.approx(1, abs=1e-6)
    assert float(aligned[1:].max()) < 0.999


def test_a_model_that_did_not_change_is_aligned_with_nothing() -> None:
    model = Small()
    assert directions(model, batches(), lambda batch: losses(model, batch), {}).alignment().tolist() == [0.0] * 5
    assert not any(module._forward_hooks for module in model.modules())
