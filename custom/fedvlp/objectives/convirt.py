"""ConVIRT / CLIP (Zhang et al., 2022, https://arxiv.org/abs/2010.00747): matches each image with its report in a batch.

Differs: a fixed temperature of 0.07 and the sum of both directions, as in MGCA and FedDRA; ConVIRT has a weighted mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.types import Batch, VLOutput


def info_nce(image: Tensor, text: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """InfoNCE of paired unit vectors image [B, d], text [B, d]: (image to text, text to image), scalars in nats.

    i2t = -(1/B) sum_i log softmax_j(image_i . text_j / temperature)[i]; t2i is the same on the transpose. Computed in
    at least float32, also under autocast. One pair gives 0. An empty batch gives 0 with a gradient of 0. Raises
    ValueError unless both have the same shape [B, d].
    """
    if image.ndim != 2 or image.shape != text.shape:
        raise ValueError(f"info_nce: image {list(image.shape)}, text {list(text.shape)}; expected the same [B, d]")
    with torch.autocast(image.device.type, enabled=False):
        dtype = torch.promote_types(torch.promote_types(image.dtype, text.dtype), torch.float32)
        image, text = image.to(dtype), text.to(dtype)
        if not len(image):
            return image.sum() * 0, text.sum() * 0
        # Row i: image i against all texts; its own text is the right answer, and so on the transpose.
        logits = image @ text.T / temperature  # [B, B]
        target = torch.arange(len(image), device=image.device)  # [B]
        return F.cross_entropy(logits, target), F.cross_entropy(logits.T, target)


class ConVIRT(ObjectiveModule):
    """InfoNCE between the unit vectors of a VLOutput, in nats: term ``contrastive``, absent when a modality is.

    ``temperature`` > 0. ``reduction``: "sum" of both directions (MGCA, FedDRA), or their "mean" (CLIP, MedCLIP).
    """

    needs = ("image", "text")

    def __init__(self, temperature: float = 0.07, reduction: str = "sum") -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise ValueError(f"ConVIRT: temperature {temperature}, expected a finite number above 0, e.g. 0.07")
        if reduction not in ("sum", "mean"):
            raise ValueError(f"ConVIRT: reduction {reduction!r}, expected 'sum' or 'mean'")
        self.temperature, self.reduction = temperature, reduction

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The term ``contrastive``, or no term."""
        if output.image is None or output.text is None:
            return {}
        i2t, t2i = info_nce(output.image, output.text, self.temperature)
        return {"contrastive": i2t + t2i if self.reduction == "sum" else (i2t + t2i) / 2}


@dataclass(frozen=True)
class ConVIRTConfig:
    """Configuration of ``ConVIRT``. Raises ValueError for a value outside of what is stated here."""

    temperature: float = 0.07  # divides the cosines; above 0
    reduction: str = "sum"  # of both directions: "sum" or "mean"

    def __post_init__(self) -> None:
        self.build()

    def build(self, model: Any = None, seed: int = 0) -> nn.Module:
        """The loss; it has no weights, so ``model`` and ``seed`` do not matter."""
        return ConVIRT(self.temperature, self.reduction)
