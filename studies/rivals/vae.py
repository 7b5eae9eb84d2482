"""The image distiller of FedFed (Yang et al., 2023, https://arxiv.org/abs/2310.05077): a small convolutional VAE."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedvlp.core.seeds import seeded
from fedvlp.models.dual_encoder import ModelConfig


@dataclass(frozen=True)
class DistillerConfig:
    """Configuration of ``Distiller``. Raises ValueError for a value below 1."""

    channels: int = 16  # of the first layer, at least 1; doubled in each of the two others
    latent: int = 16  # channels of the latent map, at least 1

    def __post_init__(self) -> None:
        for name in ("channels", "latent"):
            if getattr(self, name) < 1:
                raise ValueError(f"distiller: {name} {getattr(self, name)}, expected at least 1")

    def build(self, model: ModelConfig, seed: int) -> Distiller:
        """A distiller; the same weights for the same seed.

        Raises ValueError unless the ``image_size`` of ``model`` is a multiple of 8.
        """
        if model.image_size % 8:
            raise ValueError(f"distiller: image_size {model.image_size}, expected a multiple of 8")
        return seeded(seed, 6, lambda: Distiller(self.channels, self.latent))


class Distiller(nn.Module):
    """q(x): images [B, 1, S, S] -> (reconstruction [B, 1, S, S], KL divergence per pixel, a scalar)."""

    def __init__(self, channels: int, latent: int) -> None:
        super().__init__()
        first, second, third = channels, 2 * channels, 4 * channels
        self.encode = nn.Sequential(
            nn.Conv2d(1, first, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(first, second, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(second, third, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(third, 2 * latent, 1),
        )
        self.decode = nn.Sequential(
            nn.Conv2d(latent, third, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(third, second, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(second, first, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(first, 1, 4, 2, 1),
        )

    def forward(self, images: Tensor, sample: bool = False) -> tuple[Tensor, Tensor]:
        """Reconstruction and KL of ``images``. ``sample`` draws the latent map, as in training; else it is its mean.

        Raises ValueError for images in colour.
        """
        if images.shape[1] != 1:
            raise ValueError(
                f"distiller: images have {images.shape[1]} channels, expected 1 (grey); set colour of the data set to "
                "false"
            )
        mean, log_variance = self.encode(images).chunk(2, dim=1)  # [B, latent, S/8, S/8]
        latent = mean
        if sample:
            latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum() / images.numel()
        return self.decode(latent), kl
