"""An image drawn back from the gradient of few records (Geiping et al., 2020, https://arxiv.org/abs/2003.14053).

The attacker knows the model and the reports (whose words an update tells: one_update.py) and looks for images whose
gradient points the way that the update went: Adam on the cosine distance of both gradients plus the images' total
variation, for so many steps or seconds. What comes out is compared with the image, and with the other images of the
site.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS, SECONDS, RATE, SMOOTHNESS = 400, 60.0, 0.1, 1e-2
FILMS = 2  # records of the update; a contrastive loss of one pair has no gradient


@dataclass(frozen=True)
class Inversion:
    """How like its image a reconstruction is; cosines of what is above and below the mean, -1..1, and SSIM."""

    site: str
    records: int  # behind the update
    steps: int
    seconds: float
    cosine: float  # of the reconstruction and its image, the mean over the records
    other: float  # of the reconstruction and the most alike of other images
    ssim: float
    other_ssim: float
    films: int  # others
    matched: int  # reconstructions that are more like their image than like any other

    HEAD = (
        "site",
        "records",
        "steps",
        "seconds",
        "cosine",
        "with another",
        "SSIM",
        "with another",
        "others",
        "found",
    )

    def cells(self) -> tuple[str, ...]:
        """A line of a table of ``HEAD``."""
        alike = (f"{value:.2f}" for value in (self.cosine, self.other, self.ssim, self.other_ssim))
        spent = (str(self.records), str(self.steps), f"{self.seconds:.0f}")
        return self.site, *spent, *alike, str(self.films), f"{self.matched} of {self.records}"


def inverted(
    gradient: Callable[[Tensor], Sequence[Tensor]], wanted: Sequence[Tensor], start: Tensor, seconds: float = SECONDS
) -> tuple[Tensor, int, float]:
    """Images like ``start`` whose ``gradient`` (differentiable) points as ``wanted``; with the steps and seconds taken.

    The best by the cosine of both.
    """
    began = time.monotonic()
    films = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([films], lr=RATE)
    best, nearest, steps = start, float("inf"), 0
    while steps < STEPS and time.monotonic() - began < seconds:
        distance = _distance(gradient(films), wanted)
        if float(distance.detach()) < nearest:
            best, nearest = films.detach().clone(), float(distance.detach())
        (films.grad,) = torch.autograd.grad(distance + SMOOTHNESS * _variation(films), [films])
        films.grad.sign_()
        done = max(steps / STEPS, (time.monotonic() - began) / seconds)
        optimizer.param_groups[0]["lr"] = RATE * 0.3 ** (done // 0.25)  # in four stages: signs alone never come to rest
        optimizer.step()
        with torch.no_grad():
            films.clamp_(-1, 1)
        steps += 1
    return best, steps, time.monotonic() - began


def _distance(gradient: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """1 - cosine of two gradients, each one vector."""
    product = torch.stack([(one * other).sum() for one, other in zip(gradient, wanted, strict=True)]).sum()
    lengths = [torch.stack([one.square().sum() for one in of]).sum().sqrt() for of in (gradient, wanted)]
    return 1 - product / (lengths[0] * lengths[1]).clamp(min=1e-30)


def _variation(films: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels of images [B, C, H, W]."""
    return films.diff(dim=2).abs().mean() + films.diff(dim=3).abs().mean()


def compared(site: str, drawn: Tensor, films: Tensor, others: Tensor, steps: int, seconds: float) -> Inversion:
    """The reconstructions ``drawn`` [B, C, H, W] beside their images [B, C, H, W] and N ``others`` [N, C, H, W]."""
    own, apart = _cosine(drawn, films).diagonal(), _cosine(drawn, others).amax(dim=1)
    similar = torch.stack([ssim(one[None], other[None])[0] for one, other in zip(drawn, films, strict=True)])
    apart_similar = torch.stack([ssim(one[None].expand_as(others), others).max() for one in drawn])
    return Inversion(
        site,
        len(drawn),
        steps,
        seconds,
        cosine=float(own.mean()),
        other=float(apart.mean()),
        ssim=float(similar.mean()),
        other_ssim=float(apart_similar.mean()),
        films=len(others),
        matched=int((own > apart).sum()),
    )


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """[A, B] of images [A, ...] and [B, ...], each less its mean."""
    flat = [films.flatten(1).double() for films in (one, other)]
    unit = [torch.nn.functional.normalize(films - films.mean(dim=1, keepdim=True), dim=1) for films in flat]
    return unit[0] @ unit[1].T


def ssim(one: Tensor, other: Tensor, window: int = 7) -> Tensor:
    """Structural similarity [N] (Wang et al., 2004, doi:10.1109/TIP.2003.819861) of images [N, C, H, W] in -1..1.

    With a square window and the paper's constants.
    """
    one, other = one.double(), other.double()
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2

    def mean(of: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(of, window, stride=1)

    m1, m2 = mean(one), mean(other)
    v1, v2 = mean(one.square()) - m1.square(), mean(other.square()) - m2.square()
    both = mean(one * other) - m1 * m2
    at = (2 * m1 * m2 + c1) * (2 * both + c2) / ((m1.square() + m2.square() + c1) * (v1 + v2 + c2))
    return at.flatten(1).mean(dim=1)
