"""Masked images (MAE; He et al., 2022, https://arxiv.org/abs/2111.06377): a decoder restores hidden patches of images.

It stands beside InfoNCE of images and reports, which sees the whole image (spec 9). Differs: the hidden patches are
blanked in the image and the tower sees the rest in its place, as in SimMIM (Xie et al., 2022,
https://arxiv.org/abs/2111.09886), because convolutions and windows cannot leave tokens out; positions are learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fedvlp.core.seeds import seeded
from fedvlp.core.types import Batch
from studies.rivals.views import OnViews, SelfSupervised


def patchify(images: Tensor, side: int) -> Tensor:
    """Images [B, C, H, W] as patches [B, P, C ``side``^2], row by row."""
    strips = images.unfold(2, side, side).unfold(3, side, side)  # [B, C, H/side, W/side, side, side]
    return strips.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def masked_error(predicted: Tensor, images: Tensor, masked: Tensor) -> Tensor:
    """Mean squared error on the patches [B, P] that are ``masked`` alone; 0 where none is.

    ``predicted`` [B, P, D]; the target are the patches of ``images`` [B, C, H, W], each normalised by its own mean and
    variance (section 3 of the paper); grey is repeated to the channels that are predicted. Computed in at least
    float32, also under autocast. Raises ValueError for images of other channels.
    """
    with torch.autocast(predicted.device.type, enabled=False):
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        side = images.shape[2] // math.isqrt(masked.shape[1])
        channels = predicted.shape[2] // side**2
        if images.shape[1] not in (1, channels):
            raise ValueError(
                f"MAE: images of {images.shape[1]} channels, and a decoder that restores {channels}; set "
                f"model.in_channels to {images.shape[1]}"
            )
        # Each patch normalised by itself, so that a bright image counts no more than a dark one.
        target = patchify(images.to(predicted).expand(-1, channels, -1, -1), side)  # [B, P, D]
        deviation = (target.var(dim=2, keepdim=True, correction=0) + 1e-6).sqrt()
        target = (target - target.mean(dim=2, keepdim=True)) / deviation
        error = (predicted - target).square().mean(dim=2)  # [B, P]
        return (error * masked).sum() / masked.sum().clamp(min=1)


class MAE(OnViews):
    """Terms ``contrastive`` (InfoNCE of pairs, where there are reports) and ``masked`` (of hidden patches).

    A patch is what one token of the tower stands for: P = side^2 of them, ``side`` to a row.
    """

    needs = ("image", "text", "patches")

    def __init__(self, config: MAEConfig, width: int, patches: int, pixels: int) -> None:
        """``width``: of the tower's tokens; ``patches``: P; ``pixels``: numbers of one patch, C side^2."""
        super().__init__(config)
        self.patches, self.ratio = patches, config.ratio
        self.embed = nn.Linear(width, config.width)
        self.blank = nn.Parameter(torch.empty(1, 1, config.width))  # stands for a hidden patch
        self.position = nn.Parameter(torch.empty(1, patches, config.width))
        for parameter in (self.blank, self.position):
            nn.init.trunc_normal_(parameter, std=0.02)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, 4 * config.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(config.width)
        self.decoder = nn.TransformerEncoder(layer, config.blocks, norm, enable_nested_tensor=False)
        self.pixels = nn.Linear(config.width, pixels)

    def changed(self, images: Tensor, generator: Generator) -> Batch:
        """``masked`` [B, P], ``ratio`` of each row True, and ``views`` [B, 1, C, H, W] with those patches grey (0)."""
        count, hidden = len(images), round(self.ratio * self.patches)
        order = torch.rand(count, self.patches, generator=generator, device=generator.device).argsort(dim=1)
        masked = (order.argsort(dim=1) < hidden).to(images.device)  # [B, P]
        grid = masked.unflatten(1, (math.isqrt(self.patches), -1))[:, None]  # [B, 1, side, side]
        side = images.shape[2] // grid.shape[2]
        blanked = grid.repeat_interleave(side, dim=2).repeat_interleave(side, dim=3)  # [B, 1, H, W]
        return {"masked": masked, "views": images.masked_fill(blanked, 0.0)[:, None]}

    def compare(self, views: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The term ``masked``; ``batch`` has the ``image`` [B, C, H, W] and what is ``masked`` [B, P] of it."""
        masked = batch["masked"].to(views.device)
        return {"masked": masked_error(self.restore(views[:, 0], masked), batch["image"].to(views.device), masked)}

    def restore(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """Patches [B, P, C side^2] from ``tokens`` [B, 1 + P, W] of the blanked image; ``masked`` ones tell nothing."""
        embedded = torch.where(masked[..., None], self.blank, self.embed(tokens[:, 1:]))  # [B, P, D]
        restored: Tensor = self.pixels(self.decoder(embedded + self.position))
        return restored


@dataclass(frozen=True)
class MAEConfig(SelfSupervised):
    """Configuration of ``MAE``; the decoder is the paper's. Raises ValueError for a value outside of its range."""

    ratio: float = 0.75  # of patches that are hidden, 0 to 1; 0 leaves nothing to restore. SSL-FL on COVID images: 0.3
    width: int = 512  # of the decoder, a multiple of ``heads``
    blocks: int = 8  # of the decoder, at least 1
    heads: int = 16  # of each block, at least 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"MAE: ratio {self.ratio}, expected 0 to 1")
        if self.blocks < 1 or self.heads < 1 or self.width < 1 or self.width % self.heads:
            raise ValueError(
                f"MAE: width {self.width}, blocks {self.blocks}, heads {self.heads}; expected at least 1 of each, and "
                "a width that is a multiple of heads"
            )

    def build(self, model: Any, seed: int = 0) -> nn.Module:
        """The loss for outputs of ``model``, a DualEncoder; the same weights for the same seed.

        It restores as many channels as ``model.in_channels`` says, one where it says nothing. Raises ValueError for a
        tower whose tokens are no square grid on the image.
        """
        size, channels = model.config.image_size, model.config.in_channels or 1
        patches = tokens_of(model.image_encoder, size) - 1
        rows = math.isqrt(patches)
        if rows * rows != patches or size % rows:
            raise ValueError(
                f"MAE: the image tower gives {patches} patches of images of {size} pixels, expected a square grid "
                "whose rows divide them; choose another model.image_size"
            )
        return seeded(seed, 7, lambda: MAE(self, model.image_encoder.width, patches, channels * (size // rows) ** 2))


@torch.no_grad()
def tokens_of(tower: Any, size: int) -> int:
    """M, the tokens that an image tower gives of one image of ``size`` pixels."""
    training = tower.training
    tower.eval()  # one image has no batch statistics, and leaves none
    count = int(tower(torch.zeros(1, 1, size, size)).shape[1])
    tower.train(training)
    return count
