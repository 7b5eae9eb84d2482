"""What the self-supervised objectives share: two random views of every image, and InfoNCE of images and reports beside.

Differs from SimCLR's views (Chen et al., 2020, https://arxiv.org/abs/2002.05709, section 3): crops and intensities
alone. A chest X-ray has a side, so it is not flipped; it has no colour; and blur hides what is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.types import Batch, State, VLOutput
from fedvlp.objectives.convirt import ConVIRT

PROJECTOR = "projector."
ASPECT = 4 / 3  # the largest ratio of a crop's sides


def mlp(width: int, hidden: int, d: int) -> nn.Sequential:
    """[..., W] -> [..., d] by one hidden layer.

    Differs: layer norm in the place of the papers' batch norm, which has statistics that sites do not have in common.
    Batch statistics are not what keeps BYOL from collapse (Richemond et al., 2020, https://arxiv.org/abs/2010.10241).
    """
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, d))


def uniform(low: float, high: float, count: int, generator: Generator) -> Tensor:
    """[count] numbers between ``low`` and ``high``, drawn on the generator's device."""
    return low + (high - low) * torch.rand(count, generator=generator, device=generator.device)


def random_crops(images: Tensor, min_area: float, generator: Generator) -> Tensor:
    """[N, C, H, W] -> the same shape: of each image a random rectangle, enlarged to the size of the image.

    Its area is ``min_area`` to 1 of the image's and its sides are in a ratio of 3/4 to 4/3, as far as it fits.
    """
    count = len(images)
    area = uniform(min_area, 1.0, count, generator)
    aspect = uniform(-math.log(ASPECT), math.log(ASPECT), count, generator).exp()
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)  # shares of the image's
    x = (1 - width) * uniform(-1, 1, count, generator)  # centre, in the coordinates -1..1 of grid_sample
    y = (1 - height) * uniform(-1, 1, count, generator)
    none = torch.zeros(count)
    rows = [torch.stack([width, none, x], dim=1), torch.stack([none, height, y], dim=1)]
    placed = torch.stack(rows, dim=1).to(images)  # [N, 2, 3]
    grid = F.affine_grid(placed, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def jittered(images: Tensor, jitter: float, generator: Generator) -> Tensor:
    """[N, C, H, W] in -1..1 with contrasts changed by factors of 1 +- ``jitter``, brightness by +- ``jitter``."""
    shape = (-1, 1, 1, 1)
    contrast = uniform(1 - jitter, 1 + jitter, len(images), generator).to(images).view(shape)
    brightness = uniform(-jitter, jitter, len(images), generator).to(images).view(shape)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return ((images - mean) * contrast + mean + brightness).clamp(-1, 1)


@dataclass(frozen=True)
class SelfSupervised:
    """Settings of an objective L = L_ITC + weight L_base (spec 9). Raises ValueError for a value outside its range."""

    weight: float = 1.0  # of the self-supervised term, at least 0; 0 leaves it and its views out
    itc_temperature: float = 0.07  # tau of InfoNCE between images and reports, above 0

    def __post_init__(self) -> None:
        name = type(self).__name__.removesuffix("Config")
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"{name}: weight {self.weight}, expected a finite number of at least 0")
        if not 0 < self.itc_temperature < math.inf:
            raise ValueError(f"{name}: itc_temperature {self.itc_temperature}, expected a finite number above 0")


@dataclass(frozen=True)
class TwoViews(SelfSupervised):
    """Settings of an objective on two views of every image. Raises ValueError for a value outside its range."""

    min_area: float = 0.2  # of a crop, as a share of the image; above 0; 1 cuts off what the ratio of sides asks for
    jitter: float = 0.4  # of contrast and brightness, 0 to below 1
    hidden: int = 512  # width of the hidden layer of the projector (and of the predictor), at least 1
    dim: int = 128  # d of a view's vector, at least 1

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__.removesuffix("Config")
        if not 0 < self.min_area <= 1:
            raise ValueError(f"{name}: min_area {self.min_area}, expected a share above 0 and at most 1")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"{name}: jitter {self.jitter}, expected at least 0 and below 1")
        for field in ("hidden", "dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{name}: {field} {getattr(self, field)}, expected at least 1")


class OnViews(ObjectiveModule):
    """Base class: the term ``contrastive`` where a batch has pairs, and the terms of ``compare`` where it has views.

    So a site without reports trains on its images alone.
    """

    needs: tuple[str, ...] = ("image", "text")

    def __init__(self, config: SelfSupervised) -> None:
        super().__init__()
        self.weight = config.weight
        self.contrastive = ConVIRT(config.itc_temperature)

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The terms of a batch; those of the views alone without reports, ``contrastive`` alone without views."""
        terms: dict[str, Tensor] = self.contrastive(output, batch)
        if output.views is None:
            return terms
        return terms | {name: self.weight * term for name, term in self.compare(output.views, batch).items()}

    def takes(self, modalities: Sequence[str]) -> bool:
        return "image" in modalities and (self.weight > 0 or "text" in modalities)

    def compare(self, views: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The self-supervised terms of the model's ``views`` [B, V, M, W]."""
        raise NotImplementedError

    def draw(self, batch: Batch, generator: Generator) -> Batch:
        """The batch with its views; as it is where it has no images, or the term has no weight."""
        return {**batch, **self.changed(batch["image"], generator)} if self.weight and "image" in batch else batch

    def changed(self, images: Tensor, generator: Generator) -> Batch:
        """What is drawn for ``images`` [B, C, H, W]: ``views`` [B, V, C, H, W] and, maybe, ``masked`` [B, P]."""
        raise NotImplementedError


class OnTwoViews(OnViews):
    """Base class: two views of every image, and a projector [..., W] -> [..., d] of its own for them."""

    def __init__(self, config: TwoViews, width: int) -> None:
        super().__init__(config)
        self.min_area, self.jitter = config.min_area, config.jitter
        self.projector = mlp(width, config.hidden, config.dim)

    def changed(self, images: Tensor, generator: Generator) -> Batch:
        """``views`` [B, 2, C, H, W]; every view is cropped and jittered by numbers of its own."""
        twice = images.repeat_interleave(2, dim=0)  # [2 B, C, H, W]
        views = jittered(random_crops(twice, self.min_area, generator), self.jitter, generator)
        return {"views": views.unflatten(0, (len(images), 2))}

    def project(self, views: Tensor, weights: State | None = None) -> Tensor:
        """Vectors [B, 2, d] of the model's ``views`` [B, 2, M, W]: of their summary tokens.

        ``weights``: those of another projector by the names of this objective's state, instead of its own.
        """
        own = weights or {}
        replaced = {name.removeprefix(PROJECTOR): t for name, t in own.items() if name.startswith(PROJECTOR)}
        projected: Tensor = torch.func.functional_call(self.projector, replaced, (views[:, :, 0],))
        return projected
