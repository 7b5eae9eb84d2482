"""The optimisers give torch's own bytes, and a process that trains never imports torch's compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedvlp.core import optimizers

SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "fused": True},
    "Adam": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
}


def trained(kind: Any, settings: dict[str, Any]) -> list[torch.Tensor]:
    """Weights and optimiser state after 3 steps, a round trip through ``state_dict``, and 2 more at another rate."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    inputs = torch.randn(6, 7)
    optimizer = kind(layer.parameters(), **settings)
    for step in range(5):
        if step == 3:
            saved = optimizer.state_dict()
            optimizer = kind(layer.parameters(), **settings)
            optimizer.load_state_dict(saved)
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.zero_grad()
        layer(inputs).square().sum().backward()
        optimizer.step()
    state = [t for own in optimizer.state_dict()["state"].values() for t in own.values() if t is not None]
    return [*(p.detach() for p in layer.parameters()), *state]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bytes_are_torchs_own(name: str) -> None:
    ours = trained(getattr(optimizers, name), SETTINGS[name])
    theirs = trained(getattr(torch.optim, name), SETTINGS[name])
    assert len(ours) == len(theirs) > 6
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    assert not any(t.requires_grad for t in ours), "a step is no part of a graph"
