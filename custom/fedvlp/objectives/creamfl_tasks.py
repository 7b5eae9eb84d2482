"""Task losses of CreamFL's sites (https://arxiv.org/abs/2302.08888): pairs are matched, single modalities classified.

Pairs: PCME's soft contrastive loss (Chun et al., 2021, https://arxiv.org/abs/2101.05068) of one embedding per input.
Differs: a record may have several positive labels, or none (see ``CreamFLTask``); the papers' have exactly one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.types import MODALITIES, Batch, VLOutput

LABEL_SPACES = ("disjoint", "shared", "own")
PAIRED = ("scale", "shift")  # what pairs alone train


def soft_contrastive(image: Tensor, text: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """2 sum_ij softplus(-2 m_ij s_ij) over all pairs of image x [B, d] and text y [B, d], a scalar in nats.

    s_ij = -scale sqrt(|x_i - y_j|^2 + 1e-6) + shift; m_ij is 1 for i = j, else -1. The factor 2 stands for the two
    directions, which are equal. Computed in at least float32, also under autocast.
    """
    with torch.autocast(image.device.type, enabled=False):
        image, text = (side.to(torch.promote_types(side.dtype, torch.float32)) for side in (image, text))
        squares = image.square().sum(1)[:, None] + text.square().sum(1) - 2 * image @ text.T  # [B, B]
        score = shift - scale * (squares.clamp_min(0) + 1e-6).sqrt()
        match = 2 * torch.eye(len(image), dtype=score.dtype, device=score.device) - 1
        return 2 * F.softplus(-2 * match * score).sum()


class CreamFLTask(ObjectiveModule):
    """Term ``contrastive`` for pairs; terms ``classification`` and ``centre`` for images or reports alone; in nats.

    Classes are the labels and, if ``classes`` is one more, "none of them". The target is uniform over a record's
    positive labels, so it is the papers' one-hot where there is one. Without a class "none of them", a record without a
    positive label is left out.

    Images and reports that stand alone are classified in label spaces of their own, as the papers' are (CIFAR-100,
    AG_NEWS): images by the first, third, ... label, reports by the second, fourth, ..., with class weights
    ``image_weight`` and ``text_weight`` [C, d], in which the other's rows are not used. ``label_spaces="shared"``: both
    by all labels, with one ``weight``. ``label_spaces="own"``: by the labels that are not blank (nan) in every record
    of the batch, which are those of its own data set where several are joined; there is no "none of them" then.
    """

    needs = ("image", "text", "labels")

    def __init__(self, config: CreamFLTaskConfig, seed: int) -> None:
        super().__init__()
        self.feature_scale, self.margin, self.centre = config.feature_scale, config.margin, config.centre
        self.reduction, self.label_spaces = config.reduction, config.label_spaces
        self.scale, self.shift = (nn.Parameter(torch.tensor(15.0)) for _ in range(2))
        generator, bound = torch.Generator().manual_seed(seed), config.dim**-0.5
        for name in dict.fromkeys(map(self.weight_of, MODALITIES)):
            drawn = torch.empty(config.classes, config.dim).uniform_(-bound, bound, generator=generator)
            self.register_parameter(name, nn.Parameter(drawn))  # used as max(weight, 0)

    def weight_of(self, modality: str) -> str:
        """The name of the class weights by which records of this modality alone are classified."""
        return "weight" if self.label_spaces == "shared" else f"{modality}_weight"

    def takes(self, modalities: Sequence[str]) -> bool:
        return True  # pairs are matched, what stands alone is classified

    def idle(self, modalities: Sequence[str]) -> frozenset[str]:
        """The names of own parameters that records of these ``modalities`` do not train."""
        trained = PAIRED if len(modalities) > 1 else map(self.weight_of, modalities)
        return frozenset(name for name, _ in self.named_parameters(recurse=False)).difference(trained)

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The terms of a batch; none without labels where one modality is absent."""
        if output.image is not None and output.text is not None:
            total = soft_contrastive(output.image, output.text, self.scale, self.shift)
            return {"contrastive": total / len(output.image) if self.reduction == "mean" else total}
        modality = "image" if output.image is not None else "text"
        features: Tensor | None = getattr(output, modality)
        if features is None or "labels" not in batch:
            return {}
        with torch.autocast(features.device.type, enabled=False):
            wide = features.to(torch.promote_types(features.dtype, torch.float32))
            return self.classify(wide, batch["labels"], modality)

    def classify(self, features: Tensor, labels: Tensor, modality: str) -> dict[str, Tensor]:
        """Margin cross entropy of ``features`` [B, d] against ``labels`` [B, L], and the separation of the classes.

        Both in the label space of ``modality``. Raises ValueError where d or L does not fit the weights [C, d], or the
        space has a single class. Own labels may be fewer than C: those of a data set that was not joined with others.
        """
        weight: Tensor = self.get_parameter(self.weight_of(modality))  # [C, d]
        count, own = labels.shape[1], self.label_spaces == "own"
        if own:
            weight = weight[:count]
        if features.shape[1] != weight.shape[1] or len(weight) - count not in (0, 1):
            raise ValueError(
                f"CreamFLTask: weights {list(weight.shape)} (classes, dim), features {list(features.shape)}, "
                f"labels {list(labels.shape)}; set objective.dim to model.embedding_dim and objective.classes to the "
                "number of labels, or one more"
            )
        space = self._space(labels, modality)
        positive = (labels[:, space] == 1).to(features.dtype)  # [B, L of this space]
        if len(weight) > count:
            positive = torch.cat([positive, (positive.sum(1, keepdim=True) == 0).to(features.dtype)], dim=1)
        if positive.shape[1] < 2:
            raise ValueError(
                f"CreamFLTask: {positive.shape[1]} of {count} labels for sites with {modality} alone, "
                "expected at least 2 classes; set objective.label_spaces to shared, or objective.classes to one more "
                "than the labels"
            )
        known = positive.sum(1) > 0
        weight = torch.cat([weight[:count][space], weight[count:]]).clamp_min(0)  # [C of this space, d]
        logits = self.feature_scale * features @ weight.T - self.margin * positive  # [B, C]
        target = positive / positive.sum(1, keepdim=True).clamp_min(1)
        losses = -(target * F.log_softmax(logits, dim=1)).sum(1)  # [B]
        centre = F.cross_entropy(weight @ weight.T, torch.arange(len(weight), device=weight.device))
        return {"classification": losses.sum() / known.sum().clamp_min(1), "centre": self.centre * centre}

    def _space(self, labels: Tensor, modality: str) -> slice | Tensor:
        """Which of the ``labels`` [B, L] are the classes of records of this modality alone."""
        if self.label_spaces == "own":
            return ~labels.isnan().all(dim=0)  # [L]
        return slice(None) if self.label_spaces == "shared" else slice(MODALITIES.index(modality), None, 2)


@dataclass(frozen=True)
class CreamFLTaskConfig:
    """Configuration of ``CreamFLTask``; the defaults are the released code's (spec 6.2).

    Raises ValueError for fewer than 2 classes, a ``dim`` below 1, an unknown ``reduction`` or ``label_spaces``.
    """

    classes: int = 5  # C: L labels, or L + 1 with "none of them"; at least 2
    dim: int = field(default=128, metadata={"follows": "model.embedding_dim"})  # d
    feature_scale: float = 128.0  # multiplies the features in the logits
    margin: float = 4.0  # subtracted from the logits of the positive classes
    centre: float = 0.5  # weight of the cross entropy of W W^T against the classes
    reduction: str = "sum"  # of the loss of pairs over the batch: "sum" (released code) or "mean" (as the other terms)
    label_spaces: str = "disjoint"  # of one modality: or "shared", "own"

    def __post_init__(self) -> None:
        if self.classes < 2 or self.dim < 1:
            raise ValueError(f"CreamFLTask: classes {self.classes}, dim {self.dim}; expected at least 2 and 1")
        if self.reduction not in ("sum", "mean"):
            raise ValueError(f"CreamFLTask: reduction {self.reduction!r}, expected 'sum' or 'mean'")
        if self.label_spaces not in LABEL_SPACES:
            known = ", ".join(LABEL_SPACES)
            raise ValueError(f"CreamFLTask: label_spaces {self.label_spaces!r}; choose one of {known}")

    def build(self, model: Any = None, seed: int = 0) -> nn.Module:
        """The loss; the same class weights for the same seed."""
        return CreamFLTask(self, seed)
