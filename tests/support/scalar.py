"""A model of one weight w whose loss at a site is (w - t)^2 / 2: its gradient is w - t, so rounds are sums by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedvlp.core.method import Method
from fedvlp.core.types import Batch, State, VLOutput
from fedvlp.federation.loop import Rounds
from support.toy import SGD, Pairs, World

NAME = "image_head.weight"


class Scalar(nn.Module):
    """Every image is embedded as w, which begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.image_head = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.image_head.weight)

    def forward(self, batch: Batch) -> VLOutput:
        return VLOutput(image=self.image_head(torch.ones_like(batch["image"])))


class HalfSquare(nn.Module):
    """Mean (w - t)^2 / 2 over the images t of a batch; ``slope``: w t instead, with a gradient that is t throughout."""

    def __init__(self, slope: bool = False) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        assert output.image is not None
        loss = output.image * batch["image"] if self.slope else (output.image - batch["image"]).square() / 2
        return {"half_square": loss.mean()}


def targets(count: int, target: float) -> Pairs:
    """``count`` records of one target t."""
    return Pairs(torch.full((count, 1), target), torch.zeros(count, 1))


def scalars(method: Method, data: dict[str, Pairs], rounds: int = 1, **options: object) -> World:
    """A federation of such models; SGD with a learning rate of 0.1 and batches of 4."""
    settings = {"training": SGD, "model": Scalar, "objective": HalfSquare, **options}
    return World(method, data, rounds=Rounds(rounds=rounds, evaluate_every=0), **settings)  # type: ignore[arg-type]


def weight(state: State, name: str = NAME) -> float:
    """The one number of a state."""
    return float(state[name])
