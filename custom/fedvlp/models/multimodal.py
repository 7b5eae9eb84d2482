"""Multi-label classifier on both towers (CAR-MFL, Poudel et al., 2024, https://arxiv.org/abs/2407.04011)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedvlp.core.seeds import seeded
from fedvlp.core.types import VLOutput
from fedvlp.models.dual_encoder import Deferred, DualEncoder, Encoded, ModelConfig


@dataclass(frozen=True)
class MultimodalConfig(ModelConfig):
    """A dual encoder with a classifier of L findings. CAR-MFL: resnet50, bert-base-uncased, 128 tokens, d = 256.

    Raises ValueError as ``ModelConfig`` does, and unless ``labels`` are names without repeats.
    """

    embedding_dim: int = 256  # d of each modality's feature
    head_hidden: int | None = None  # the heads are one linear layer
    alignment: bool = False  # no alignment blocks
    labels: tuple[str, ...] = ()  # names of the L findings, in the order of the data's columns

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.labels, str):
            raise ValueError("MultimodalConfig.labels: one text, expected a list of names")
        object.__setattr__(self, "labels", tuple(self.labels))  # JSON knows lists only
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise ValueError(f"MultimodalConfig.labels: {len(self.labels)} names, expected at least one and no repeats")

    def build(self, seed: int = 0) -> MultimodalClassifier:
        """The classifier; the same weights for the same seed. Raises InitialWeightsError as ``ModelConfig.build``."""
        return self._with_towers(self.untrained(seed))

    def untrained(self, seed: int = 0) -> MultimodalClassifier:
        return MultimodalClassifier(self, seed)


class MultimodalClassifier(DualEncoder):
    """Logits [B, L] = W [image; text] + b of unit features [B, d] each. An absent modality's feature is zero.

    So the columns of W that read an absent modality get no gradient from that batch (zero filling, spec 8.1).
    """

    config_class: ClassVar[type[ModelConfig]] = MultimodalConfig
    contrastive: ClassVar[bool] = False

    def __init__(self, config: MultimodalConfig, seed: int = 0, saved: dict[str, Any] | None = None) -> None:
        super().__init__(config, seed, saved)
        self.classifier = seeded(seed, 6, lambda: nn.Linear(2 * config.embedding_dim, len(config.labels)))

    def project(self, encoded: Encoded | Deferred) -> VLOutput:
        """The dual encoder's output, with ``logits`` [B, L]."""
        output = super().project(encoded)
        return replace(output, logits=self.classifier(fused(output.image, output.text)))


def fused(image: Tensor | None, text: Tensor | None) -> Tensor:
    """[image; text], [B, 2 d], of features [B, d]; zeros for an absent one. Raises ValueError if both are absent."""
    present = image if image is not None else text
    if present is None:
        raise ValueError("classifier: the batch has neither image nor text")
    zeros = torch.zeros_like(present)
    return torch.cat([zeros if feature is None else feature for feature in (image, text)], dim=1)
