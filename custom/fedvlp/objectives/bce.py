"""Binary cross-entropy per finding; blank and uncertain labels are masked or set by policy (CheXpert's U-policies)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.types import Batch, VLOutput

POLICIES = {"ignore": torch.nan, "zeros": 0.0, "ones": 1.0}
"""Policy -> target of such a label, nan: masked (Irvin et al., 2019, https://arxiv.org/abs/1901.07031, section 3.1)."""


class BCE(ObjectiveModule):
    """Mean binary cross-entropy over the known labels of a batch, in nats: term ``bce``.

    The term is absent without logits or labels, and 0 where no label is known. ``uncertain`` labels (-1) follow the
    policy "ignore", "zeros" or "ones"; ``blank`` ones (nan, not mentioned) "ignore" or "zeros".
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
        """Targets [B, L] in {1, 0, nan: masked} of labels [B, L] in {1, 0, -1, nan}."""
        known = torch.where(labels.isnan(), POLICIES[self.blank], labels)
        return torch.where(labels == -1, POLICIES[self.uncertain], known)

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The term ``bce``. Raises ValueError where logits [B, L] and labels have different shapes."""
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
    """Configuration of ``BCE``. Raises ValueError for an unknown policy."""

    uncertain: str = "ignore"  # target of a label -1: "ignore" (masked), "zeros", "ones"
    blank: str = "ignore"  # target of a label nan: "ignore" (masked), "zeros"

    def __post_init__(self) -> None:
        self.build()

    def build(self, model: Any = None, seed: int = 0) -> BCE:
        """The loss; it has no weights, so ``model`` and ``seed`` do not matter."""
        return BCE(self.uncertain, self.blank)
