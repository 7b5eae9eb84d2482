"""Multi-label classification (spec 10.5): macro AUC over findings, rare findings, and the weight of each modality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedvlp.core.types import MODALITIES, Batch
from fedvlp.evaluation import metric_names

RARE = 0.1
"""A finding is rare when less than this share of its known labels is positive."""


@dataclass(frozen=True)
class AUC:
    """Areas under the ROC curve, 0..1."""

    by_label: dict[str, float]  # finding -> AUC
    rare: tuple[str, ...]  # those of ``by_label`` that are rare (``RARE``)
    skipped: tuple[str, ...]  # findings without an AUC: their known labels are all alike, or there are none

    def macro(self, names: Sequence[str] | None = None) -> float | None:
        """Unweighted mean AUC, 0..1, over the findings ``names`` (None: all) that have one; None where none has."""
        values = [value for name, value in self.by_label.items() if names is None or name in names]
        return sum(values) / len(values) if values else None


def roc(scores: Tensor, truth: Tensor, rates: Sequence[float]) -> list[float]:
    """Sensitivity at each of the false-positive ``rates`` (ascending, 0..1), from scores [N] and truth [N] in {1, 0}.

    Equal scores are one threshold, between thresholds the curve is a straight line: its area is the AUC.
    """
    values, index = torch.unique(scores, return_inverse=True)

    def shares(kind: Tensor) -> list[float]:
        """Of the records of a kind, the share at or above each value, from none to all."""
        at_value = torch.zeros(len(values), dtype=torch.float64).index_add(0, index, kind)
        return [0.0, *(at_value.flip(0).cumsum(0) / kind.sum()).tolist()]

    curve = np.interp(rates, shares(1 - truth.double()), shares(truth.double()))
    return [float(value) for value in curve]


def refuse_nan(scores: Tensor, who: str) -> None:
    """Raises ValueError for scores that are nan: they have no order, and sorting puts them last, as if most certain."""
    count = int(scores.isnan().sum())
    if count:
        raise ValueError(
            f"{who}: {count} of {scores.numel()} scores are nan; expected numbers; look for a diverged model or an "
            "empty input"
        )


def rank_sum_auc(scores: Tensor, truth: Tensor) -> float:
    """Area under the ROC curve from scores [N] and truth [N] in {1, 0}, both classes present (Mann and Whitney, 1947).

    It is the share of pairs (positive, negative) in which the positive scores higher; a tie counts a half. With R the
    ranks of the P positives among all N (ties share their mean rank), it is (sum R - P (P + 1) / 2) / (P (N - P)).
    Raises ValueError for a score that is nan.
    """
    refuse_nan(scores, "auc")
    _, distinct, counts = scores.unique(return_inverse=True, return_counts=True)  # [N], [D]
    mean_rank = counts.cumsum(0) - (counts - 1) / 2  # of every distinct score; ranks begin at 1
    positives = int(truth.sum())
    wins = float(mean_rank.double()[distinct[truth == 1]].sum()) - positives * (positives + 1) / 2
    return wins / (positives * (len(truth) - positives))


def auc(scores: Tensor, targets: Tensor, names: Sequence[str]) -> AUC:
    """AUC per finding from scores [N, L] and targets [N, L] in {1, 0, nan: unknown, left out}.

    ``names`` are the L findings. Raises ValueError where shapes or names do not fit, and for a score that is nan.
    """
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
def predict(
    model: nn.Module, objective: Any, batches: Iterator[Batch], without: str | None = None
) -> tuple[Tensor, Tensor]:
    """Sigmoid scores [N, L] and the objective's targets [N, L], on the CPU. Sets the model to eval mode.

    The modality ``without`` is kept from the model, to which its feature is zero then.

    Differs: the released code gives logits to torchmetrics, which guesses batch by batch whether they are scores.
    """
    model.eval()
    scores, targets = [], []
    for batch in batches:
        seen = {name: value for name, value in batch.items() if not without or name.partition("_")[0] != without}
        scores.append(model(seen).logits.sigmoid())
        targets.append(objective.targets(batch["labels"]))
    return torch.cat(scores).cpu(), torch.cat(targets).cpu()


def modality_shares(weight: Tensor) -> dict[str, float]:
    """Modality -> its share, 0..1, of the classifier's absolute ``weight`` [L, 2 d]; 0.5 each is no bias."""
    image, text = (half.abs().sum().item() for half in weight.detach().double().chunk(2, dim=1))
    return dict(zip(MODALITIES, (image / (image + text), text / (image + text)), strict=True))


@dataclass(frozen=True)
class Classification:
    """Areas under the ROC curve of a classifier on held-out records, and its modality bias.

    The names of the figures are in ``metric_names``. A finding whose labels in the split are all alike has no area. A
    record is judged by what its site has of it: the feature of an absent modality is zero. On the records that have
    both, the means of the same model with either zeroed say what each is worth.
    """

    batch_size: int = 96  # records embedded at once

    def __call__(self, client: Any, splits: tuple[str, ...]) -> dict[str, float]:
        """Name -> figure on ``splits`` of ``client.data`` for ``client.model``."""
        metrics = {metric_names.IMAGE_WEIGHT: modality_shares(client.model.classifier.weight)["image"]}
        for split in splits:
            if client.data.sizes.get(split, 0):
                metrics |= self.measure(client, split)
        return metrics

    def measure(self, client: Any, split: str) -> dict[str, float]:
        """Name -> AUC on one split."""
        areas = self.areas(client, split)
        figures = means(areas) | areas.by_label
        if len(client.data.having(split)):
            for modality in MODALITIES:
                half = means(self.areas(client, split, modality))
                figures |= {metric_names.without(name, modality): value for name, value in half.items()}
        return {metric_names.auc(split, name): value for name, value in figures.items()}

    def areas(self, client: Any, split: str, without: str | None = None) -> AUC:
        """The AUCs on one split, of the model as it is; or on its pairs, with a modality zeroed."""
        pairs = client.data.having(split) if without else None
        batches = client.data.batches(split, self.batch_size, drop_last=False, rows=pairs)
        scores, targets = predict(client.model, client.objective, batches, without)
        return auc(scores, targets, client.model.config.labels)


def means(areas: AUC) -> dict[str, float]:
    """The macro and the rare mean of AUCs, where they exist."""
    macro_and_rare = {metric_names.MACRO: areas.macro(), metric_names.RARE: areas.macro(areas.rare)}
    return {name: value for name, value in macro_and_rare.items() if value is not None}
