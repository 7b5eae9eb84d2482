"""Measures a model on one site's held-out records; the callable that a Site is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.types import Batch
from fedvlp.evaluation.retrieval import folded_retrieval, in_batch_retrieval, retrieval


@torch.no_grad()
def embed(model: nn.Module, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
    """Unit vectors of all pairs in order: images [N, d], texts [N, d]. The model is used in eval mode."""
    model.eval()
    outputs = [model(batch) for batch in batches]
    return torch.cat([o.image for o in outputs]).cpu(), torch.cat([o.text for o in outputs]).cpu()


def paired_similarity(image: Tensor, text: Tensor) -> float:
    """Mean cosine of image i [N, d] and text i [N, d], unit vectors (FedRGB's measure of alignment)."""
    return float((image.double() * text.double()).sum(1).mean())


@dataclass(frozen=True)
class Retrieval:
    """Image-text retrieval (spec 10.1): in batches of ``batch_size`` in fixed order, and over the whole split.

    Metric names: ``<split>/<i2t|t2i|mean>/r<k>`` in batch, ``<split>/all/...`` over the split, in percent. A split
    smaller than one batch has no in-batch figure, a site without images or without reports none at all.
    ``<split>/similarity`` is the mean cosine of the pairs, in [-1, 1].
    With ``captions``, rows with the same pixels are captions of one image, which has so many right answers (CreamFL's
    protocol; then nothing in batch). With ``folds``, ``<split>/fold/...`` is the mean over so many folds of the images,
    contiguous in their order, where that divides their number (CreamFL: 5 of 1,000 in 5,000).
    """

    batch_size: int = 32
    ks: tuple[int, ...] = (1, 5, 10)
    captions: bool = False
    folds: int = 0

    def __call__(self, client: Any, splits: tuple[str, ...]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if set(client.data.modalities) != {"image", "text"}:
            return metrics
        for split in splits:
            if client.data.sizes.get(split, 0) >= 2:
                metrics |= self.measure(client.model, client.data, split)
        return metrics

    def measure(self, model: nn.Module, data: Any, split: str) -> dict[str, float]:
        """All figures of one split."""
        image, text = embed(model, data.batches(split, self.batch_size, drop_last=False))
        found = {"similarity": paired_similarity(image, text)}
        if len(image) >= self.batch_size:
            found |= in_batch_retrieval(image, text, self.batch_size, self.ks)
        owner = None
        if self.captions:
            first, owner = data.shared_images(split)
            if len(first) < len(image):
                found = {"similarity": found["similarity"]}  # a batch would hold an image twice
            image = image[first]
        found |= {f"all/{name}": v for name, v in retrieval(image, text, self.ks, owner).items()}
        if self.folds and len(image) % self.folds == 0:
            folded = folded_retrieval(image, text, owner, self.folds, self.ks)
            found |= {f"fold/{name}": value for name, value in folded.items()}
        return {f"{split}/{name}": value for name, value in found.items()}
