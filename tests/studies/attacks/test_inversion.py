"""A film drawn back from a gradient: found through a linear layer, not found in a gradient of something else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from studies.attacks.inversion import compared, inverted, ssim

pytestmark = pytest.mark.slow(seconds=2)


def films(count: int, seed: int = 0) -> Tensor:
    """Smooth random films [N, 1, 16, 16] in -1..1."""
    small = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return torch.tanh(torch.nn.functional.interpolate(small, size=(16, 16), mode="bilinear"))


WEIGHTS = torch.randn(256, 32, generator=torch.Generator().manual_seed(1)) / 16


def gradient(drawn: Tensor) -> Sequence[Tensor]:
    """Of 1/2 |tanh(x W)|^2 with regard to W, as one step on the batch has it."""
    weights = WEIGHTS.clone().requires_grad_(True)
    loss = torch.tanh(drawn.flatten(1) @ weights).square().sum() / 2
    return torch.autograd.grad(loss, [weights], create_graph=True)


def test_a_film_is_found_in_the_gradient_of_one_step() -> None:
    wanted, start = films(1), films(1, 7) * 0.1
    target = [one.detach() for one in gradient(wanted)]
    drawn, steps, seconds = inverted(gradient, target, start, seconds=60)
    found = compared("north", drawn, wanted, films(50, 2), steps, seconds)
    assert found.cosine > 0.8 > found.other
    assert found.matched == 1
    assert found.films == 50
    assert steps > 10


def test_a_gradient_of_other_films_gives_none_away() -> None:
    generator = torch.Generator().manual_seed(3)
    drawn, steps, seconds = inverted(gradient, [torch.randn(256, 32, generator=generator)], films(1, 7) * 0.1, 60)
    found = compared("north", drawn, films(1), films(50, 2), steps, seconds)
    assert found.matched == 0
    assert found.cosine < 0.5


def test_it_ends_in_time() -> None:
    _, steps, _ = inverted(gradient, [torch.randn_like(WEIGHTS)], films(1), seconds=0.0)
    assert steps == 0


def test_structural_similarity() -> None:
    """1 with itself, less with noise, and of two constants c and d: (2cd + c1) / (c^2 + d^2 + c1)."""
    one = films(2)
    assert ssim(one, one).tolist() == pytest.approx([1, 1])
    assert float(ssim(one, one + 0.3 * torch.randn_like(one)).max()) < 0.99
    half, third = torch.full((1, 1, 9, 9), 0.5), torch.full((1, 1, 9, 9), 0.3)
    expected = (2 * 0.15 + 0.0004) / (0.25 + 0.09 + 0.0004)
    assert float(ssim(half, third)) == pytest.approx(expected, rel=1e-5)
