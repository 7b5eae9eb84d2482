"""Binary cross-entropy per finding, blank and uncertain labels masked or settled by policy (CheXpert's U-policies)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.types import Batch, VLOutput

POLICIES = {"ignore": torch.nan, "zeros": 0.0, "ones": 1.0}
"""What a label counts as; ``ignore`` masks its loss (Irvin et al., 2019, https://arxiv.org/abs/1901.07031, 3.1)."""


class BCE(nn.Module):
    """Mean binary cross-entropy over the known labels of a batch, in nats; term ``bce``, absent without logits.

    ``uncertain`` (-1) is U-Ignore, U-Zeros or U-Ones; ``blank`` (nan, not mentioned) is "ignore" or "zeros".
    """

    needs = ("labels",)

    def __init__(self, uncertain: str = "ignore", blank: str = "ignore") -> None:
        super().__init__()
        if uncertain not in POLICIES:
            raise ValueError(f"BCE: uncertain {uncertain!r}, expected one of {', '.join(POLICIES)}")
        if blank not in ("ignore", "zeros"):
            raise ValueError(f"BCE: blank {blank!r}, expected 'ignore' or 'zeros'")
        self.uncertain, self.blank = uncertain, blank

    def targets(self, labels: Tensor) -> Tensor:
        """Labels [B, L] in {1, 0, -1, nan} as 1, 0 or nan (masked)."""
        known = torch.where(labels.isnan(), POLICIES[self.blank], labels)
        return torch.where(labels == -1, POLICIES[self.uncertain], known)

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        if output.logits is None or "labels" not in batch:
            return {}
        targets = self.targets(batch["labels"])
        if targets.shape != output.logits.shape:
            raise ValueError(
                f"BCE: labels {list(targets.shape)}, logits {list(output.logits.shape)}; the model's labels must be "
                "the data's"
            )
        known = ~targets.isnan()
        logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
        weight = known.to(logits.dtype) / known.sum().clamp(min=1)
        return {"bce": F.binary_cross_entropy_with_logits(logits, targets.nan_to_num(0.0), weight, reduction="sum")}


@dataclass(frozen=True)
class BCEConfig:
    """Configuration of ``BCE``; see there."""

    uncertain: str = "ignore"
    blank: str = "ignore"

    def __post_init__(self) -> None:
        self.build()

    def build(self, model: Any = None, seed: int = 0) -> BCE:
        return BCE(self.uncertain, self.blank)
