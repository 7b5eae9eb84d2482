"""Multi-label classification (spec 10.5): macro AUC over findings, rare findings, and the weight of each modality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.types import MODALITIES, Batch

RARE = 0.1
"""A finding is rare when a smaller part of the known labels is positive."""


@dataclass(frozen=True)
class AUC:
    """Areas under the ROC curve, 0 to 1; ``skipped`` findings had one class only (or none)."""

    by_label: dict[str, float]
    rare: tuple[str, ...]  # of those in ``by_label``
    skipped: tuple[str, ...]

    def macro(self, names: Sequence[str] | None = None) -> float | None:
        """The unweighted mean over the findings ``names`` (all) that have an area; None where none has."""
        values = [value for name, value in self.by_label.items() if names is None or name in names]
        return sum(values) / len(values) if values else None


def rank_sum_auc(scores: Tensor, truth: Tensor) -> float:
    """Area under the ROC curve from scores [N] and truth [N] in {1, 0}, both classes present (Mann and Whitney, 1947).

    The share of pairs (positive, negative) in which the positive scores higher; a tie counts a half. With the ranks R
    of the P positives among all N, ties sharing their mean rank: (sum R - P (P + 1) / 2) / (P (N - P)).
    """
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    mean_rank = counts.cumsum(0) - (counts - 1) / 2  # of every distinct score; ranks begin at 1
    positives = int(truth.sum())
    wins = float(mean_rank.double()[place[truth == 1]].sum()) - positives * (positives + 1) / 2
    return wins / (positives * (len(truth) - positives))


def auc(scores: Tensor, targets: Tensor, names: Sequence[str]) -> AUC:
    """Area per finding from scores [N, L] and targets [N, L] in {1, 0, nan: unknown, left out}; ties count a half."""
    if scores.shape != targets.shape or targets.ndim != 2 or targets.shape[1] != len(names):
        raise ValueError(f"auc: scores {list(scores.shape)}, targets {list(targets.shape)}, {len(names)} names")
    areas: dict[str, float] = {}
    rare, skipped = [], []
    for name, score, target in zip(names, scores.double().T, targets.double().T, strict=True):
        known = ~target.isnan()
        truth = target[known]
        if not 0 < truth.sum() < len(truth):
            skipped.append(name)
            continue
        areas[name] = rank_sum_auc(score[known], truth)
        if truth.mean() < RARE:
            rare.append(name)
    return AUC(areas, tuple(rare), tuple(skipped))


@torch.no_grad()
def predict(model: nn.Module, objective: Any, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
    """Sigmoid scores [N, L] and targets [N, L] as the objective settles them. The model is used in eval mode.

    Scores are the sigmoid's throughout (the released code feeds logits, on which torchmetrics guesses per batch).
    """
    model.eval()
    found = [(model(batch).logits.sigmoid(), objective.targets(batch["labels"])) for batch in batches]
    return torch.cat([score for score, _ in found]).cpu(), torch.cat([target for _, target in found]).cpu()


def modality_shares(weight: Tensor) -> dict[str, float]:
    """Share of the classifier's absolute weight [L, 2 d] on each modality: 0.5 each is an unbiased classifier."""
    image, text = (half.abs().sum().item() for half in weight.detach().double().chunk(2, dim=1))
    return dict(zip(MODALITIES, (image / (image + text), text / (image + text)), strict=True))


@dataclass(frozen=True)
class Classification:
    """Held-out areas of a classifier: ``<split>/auc/macro``, ``/rare`` and ``/<finding>``; 0 to 1.

    Findings with one class in the split have none. ``classifier/image`` is the modality-bias measure. A record is
    judged by what its site has of it: an absent modality's feature is zero.
    """

    batch_size: int = 96

    def __call__(self, client: Any, splits: tuple[str, ...]) -> dict[str, float]:
        metrics = {"classifier/image": modality_shares(client.model.classifier.weight)["image"]}
        for split in splits:
            if client.data.sizes.get(split, 0):
                metrics |= self.measure(client, split)
        return metrics

    def measure(self, client: Any, split: str) -> dict[str, float]:
        """All figures of one split."""
        batches = client.data.batches(split, self.batch_size, drop_last=False)
        found = auc(*predict(client.model, client.objective, batches), client.model.config.labels)
        means = {"macro": found.macro(), "rare": found.macro(found.rare)}
        figures = {name: value for name, value in means.items() if value is not None} | found.by_label
        return {f"{split}/auc/{name}": value for name, value in figures.items()}
