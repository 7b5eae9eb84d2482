"""Retrieval on one site's held-out records: a callable that a Site is given to evaluate with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.types import IMAGE_TOKENS, MODALITIES, Batch
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.retrieval import folded_retrieval, in_batch_retrieval, retrieval


@torch.no_grad()
def embed(model: nn.Module, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
    """Unit vectors of all pairs of ``batches`` in order: images [N, d], texts [N, d], on the CPU. Sets eval mode."""
    model.eval()
    outputs = [model(batch) for batch in batches]
    return torch.cat([o.image for o in outputs]).cpu(), torch.cat([o.text for o in outputs]).cpu()


def embed_images(model: nn.Module, batches: Iterator[Batch]) -> Iterator[Tensor]:
    """Unit vectors [B, d] of the images of each batch, or of what frozen towers made of them (``cache_features``)."""
    for batch in batches:
        yield model({name: batch[name] for name in ("image", IMAGE_TOKENS) if name in batch}).image


def paired_similarity(image: Tensor, text: Tensor) -> float:
    """Mean cosine, -1..1, of the paired unit vectors image [N, d] and text [N, d] (FedRGB's measure of alignment)."""
    return float((image.double() * text.double()).sum(1).mean())


@dataclass(frozen=True)
class Retrieval:
    """Image-text retrieval (spec 10.1): in batches of ``batch_size`` in fixed order, and over the whole split.

    The names of the figures are in ``metric_names``. A split smaller than one batch has no in-batch figure, a split of
    one pair none, and one without images or without reports none either.
    """

    batch_size: int = 32  # candidates of a query in batch
    ks: tuple[int, ...] = (1, 5, 10)  # the K of Recall@K
    captions: bool = (
        False  # rows with equal pixels are captions of one image, all of them right (CreamFL); none in batch
    )
    folds: int = 0  # also the mean over so many contiguous folds of the images, if that divides their number; 0: none

    def __call__(self, client: Any, splits: tuple[str, ...]) -> dict[str, float]:
        """Name -> figure on ``splits`` of ``client.data`` for ``client.model``."""
        metrics: dict[str, float] = {}
        for split in splits:
            if client.data.modalities_in(split) != MODALITIES:
                continue
            if client.data.sizes.get(split, 0) >= 2:
                metrics |= self.measure(client.model, client.data, split)
        return metrics

    def measure(self, model: nn.Module, data: Any, split: str) -> dict[str, float]:
        """Name -> figure of ``model`` on one split of ``data`` (a SiteData with pairs), of at least 2 records."""
        image, text = embed(model, data.batches(split, self.batch_size, drop_last=False))
        figures = {names.similarity(split): paired_similarity(image, text)}
        in_batch: dict[str, float] = {}
        if len(image) >= self.batch_size:
            in_batch = in_batch_retrieval(image, text, self.batch_size, self.ks)
        owner = None
        if self.captions:
            first, owner = data.shared_images(split)
            if len(first) < len(image):
                in_batch = {}  # a batch would hold an image twice
            image = image[first]
        scopes = {names.IN_BATCH: in_batch, names.WHOLE_SET: retrieval(image, text, self.ks, owner)}
        if self.folds and len(image) % self.folds == 0:
            scopes[names.FOLDS] = folded_retrieval(image, text, owner, self.folds, self.ks)
        for scope, recalls in scopes.items():
            figures |= {names.on_split(split, scope, name): value for name, value in recalls.items()}
        return figures
