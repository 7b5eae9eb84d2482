"""MedCLIP (Wang et al., 2022, https://arxiv.org/abs/2210.10163): pairs whose findings agree count as partial matches.

Differs: the released code takes the dot product of the label vectors, the paper its cosine: ``similarity`` chooses.
On sentences (``sentences``), a sentence of the report stands for it, with labels of its own (data/sentences.py).
The second, word-shuffled view of each report is left out, because augmentation is the loader's task.
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

LARGEST_SCALE = math.log(100.0)  # of the learnable log scale, as in CLIP
SIMILARITIES = ("dot", "cosine")


def finding_vectors(labels: Tensor, negative: float = -1.0) -> Tensor:
    """Vectors [B, L + 1] that can be compared, of labels [B, L] in {1, 0, -1 uncertain, nan not mentioned}.

    A present finding is 1, a denied one ``negative``, an uncertain one or one not mentioned 0. The last entry, "No
    Finding", is 1 where no finding is present or uncertain.
    """
    values = torch.where(labels == 1, 1.0, torch.where(labels == 0, negative, 0.0))  # nan equals nothing: 0
    healthy = ~((labels == 1) | (labels == -1)).any(dim=1, keepdim=True)
    return torch.cat([values, healthy.to(values.dtype)], dim=1)


def semantic_matching(image: Tensor, text: Tensor, similarity: Tensor, scale: float | Tensor) -> Tensor:
    """Soft cross entropy of unit vectors image [B, d], text [B, d] against targets from ``similarity`` [B, B].

    1/2 [-(1/B) sum_ij softmax_j(S_ij) log softmax_j(scale image_i . text_j) + the same on both transposes] (MedCLIP,
    section 3.3), in nats. S = k I tends to the mean of both InfoNCE directions as k grows; a constant S is least at
    log B. An empty batch gives 0. Raises ValueError for other shapes.
    """
    if image.ndim != 2 or image.shape != text.shape or similarity.shape != (len(image), len(image)):
        seen = f"image {list(image.shape)}, text {list(text.shape)}, similarity {list(similarity.shape)}"
        raise ValueError(f"semantic_matching: {seen}; expected [B, d] twice and [B, B]")
    if not len(image):
        return image.sum() * 0 + text.sum() * 0
    with torch.autocast(image.device.type, enabled=False):
        dtype = torch.promote_types(torch.promote_types(image.dtype, text.dtype), torch.float32)
        # Predicted and wanted distributions over the texts of the batch, then over its images.
        logits = scale * (image.to(dtype) @ text.to(dtype).T)  # [B, B]
        similarity = similarity.to(dtype)
        i2t = F.cross_entropy(logits, similarity.softmax(dim=1))
        t2i = F.cross_entropy(logits.T, similarity.T.softmax(dim=1))
        return (i2t + t2i) / 2


class MedCLIP(ObjectiveModule):
    """Semantic matching by the findings of the records, in nats: term ``contrastive``, absent when a modality is.

    The scale of the cosines is learned: exp(``logit_scale``), in [1, 100]. In a batch without ``labels`` every
    image matches its own report alone, which is CLIP's loss. ``sentences`` asks for batches whose texts are sentences,
    with ``text_labels``; in a batch without these, texts have the labels of their images.
    """

    needs: tuple[str, ...] = ("image", "text", "labels")

    def __init__(
        self, temperature: float = 0.07, negative: float = -1.0, similarity: str = "dot", sentences: bool = False
    ) -> None:
        super().__init__()
        if not 0.01 <= temperature <= 1:
            raise ValueError(f"MedCLIP: temperature {temperature}, expected 0.01 to 1 (the scale starts at 1/t)")
        if not -1 <= negative <= 0:
            raise ValueError(f"MedCLIP: negative {negative}, expected -1 (denials agree) to 0 (they say nothing)")
        if similarity not in SIMILARITIES:
            raise ValueError(f"MedCLIP: similarity {similarity!r}, expected one of {', '.join(SIMILARITIES)}")
        self.negative, self.similarity = negative, similarity
        if sentences:
            self.needs = (*self.needs, "sentences")
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / temperature)))

    def forward(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The term ``contrastive``, or no term."""
        if output.image is None or output.text is None:
            return {}
        scale = self.logit_scale.clamp(0.0, LARGEST_SCALE).exp()
        return {"contrastive": semantic_matching(output.image, output.text, self._targets(output.image, batch), scale)}

    @torch.no_grad()
    def after_step(self) -> None:
        """Takes the scale back into its range: beyond it the loss has no gradient, and it would stay there."""
        self.logit_scale.clamp_(0.0, LARGEST_SCALE)

    @torch.no_grad()
    def entropy(self, output: VLOutput, batch: Batch) -> dict[str, Tensor]:
        """The least value of ``contrastive`` on this batch: the mean entropy of both sides' targets, in nats."""
        if output.image is None or output.text is None or not len(output.image):
            return {}
        similarity = self._targets(output.image, batch)
        sides = [torch.special.entr(side.softmax(dim=1)).sum(dim=1).mean() for side in (similarity, similarity.T)]
        return {"contrastive": (sides[0] + sides[1]) / 2}

    def _targets(self, image: Tensor, batch: Batch) -> Tensor:
        """S [B, B], images x texts, from the labels; without labels the log of the identity."""
        if "labels" not in batch:
            return torch.eye(len(image), device=image.device).log()  # its softmax is the identity
        images = finding_vectors(batch["labels"], self.negative)  # [B, L + 1]
        texts = finding_vectors(batch.get("text_labels", batch["labels"]), self.negative)  # [B, L + 1]
        if self.similarity == "cosine":
            images, texts = F.normalize(images, dim=1), F.normalize(texts, dim=1)
        return images @ texts.T


@dataclass(frozen=True)
class MedCLIPConfig:
    """Configuration of ``MedCLIP``. Raises ValueError for a value outside of its range."""

    temperature: float = 0.07  # the learned scale starts at its inverse; 0.01 to 1
    negative: float = -1.0  # entry of a denied finding in the vector, -1 (denials agree) to 0 (they say nothing)
    similarity: str = "dot"  # of the vectors: "dot" (released code) or "cosine" (paper)
    sentences: bool = False  # train on one random sentence of each report, with its own labels (data/sentences.py)

    def __post_init__(self) -> None:
        self.build()

    def build(self, model: Any = None, seed: int = 0) -> nn.Module:
        """The loss; its initial weight does not depend on ``model`` or ``seed``."""
        return MedCLIP(self.temperature, self.negative, self.similarity, self.sentences)
