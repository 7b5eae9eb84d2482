"""NT-Xent (SimCLR; Chen et al., 2020, https://arxiv.org/abs/2002.05709): tells each image's two views from all others.

It stands beside InfoNCE of images and reports, as in SLIP (Mu et al., 2021, https://arxiv.org/abs/2112.12750).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.seeds import seeded
from fedvlp.core.types import Batch
from studies.rivals.views import OnTwoViews, TwoViews, mlp


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """NT-Xent of two views' vectors [B, d] each, of any length: a scalar in nats (eq. 1, mean over the 2 B).

    -log exp(cos(z_i, z_j) / T) / sum_{k != i} exp(cos(z_i, z_k) / T), j being the other view of the image of i and k
    all other views of the batch. Computed in at least float32, also under autocast. One image gives 0, an empty batch 0
    with a gradient of 0. Raises ValueError unless both have the same shape [B, d].
    """
    if first.ndim != 2 or first.shape != second.shape:
        raise ValueError(f"nt_xent: first {list(first.shape)}, second {list(second.shape)}; expected the same [B, d]")
    with torch.autocast(first.device.type, enabled=False):
        both = torch.cat([first, second])
        if not len(both):
            return both.sum() * 0
        z = F.normalize(both.to(torch.promote_types(both.dtype, torch.float32)), dim=1)  # [2 B, d]
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        logits = (z @ z.T / temperature).masked_fill(itself, -math.inf)  # [2 B, 2 B]
        other = torch.arange(len(z), device=z.device).roll(len(first))  # i + B, modulo 2 B
        return F.cross_entropy(logits, other)


class NTXent(OnTwoViews):
    """Terms ``contrastive`` (InfoNCE of pairs, where there are reports) and ``nt_xent`` (of views), in nats."""

    contrasts = True

    def __init__(self, config: NTXentConfig, width: int) -> None:
        super().__init__(config, width)
        self.temperature = config.temperature
        self.predictor = mlp(config.dim, config.hidden, config.dim) if config.predictor else nn.Identity()

    def compare(self, views: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The term ``nt_xent``."""
        first, second = self.project(views).unbind(dim=1)  # [B, d] each
        return {"nt_xent": self.contrast(first, second)}

    def contrast(self, first: Tensor, second: Tensor) -> Tensor:
        """:func:`nt_xent` of vectors [B, d] each with this objective's temperature."""
        return nt_xent(first, second, self.temperature)


@dataclass(frozen=True)
class NTXentConfig(TwoViews):
    """Configuration of ``NTXent``. Raises ValueError for a value outside of its range."""

    temperature: float = 0.5  # T of NT-Xent, above 0; FedX: 0.1
    predictor: bool = False  # whether there is a predictor beside the projector, which FedX alone trains

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"NTXent: temperature {self.temperature}, expected a finite number above 0")

    def build(self, model: Any, seed: int = 0) -> nn.Module:
        """The loss for outputs of ``model``, a DualEncoder; the same weights for the same seed."""
        return seeded(seed, 7, lambda: NTXent(self, model.image_encoder.width))
