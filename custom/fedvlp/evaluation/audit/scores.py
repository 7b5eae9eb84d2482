"""The scores of records that somebody computes who has a model and the records: the start of every attack on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.types import Batch
from fedvlp.evaluation.audit.gradients import Directions, directions
from fedvlp.evaluation.audit.membership import LOSS, label_scores, pair_scores
from fedvlp.evaluation.site_metrics import embed

MEMBERS, OTHERS, POOL = "members", "others", "reference"
"""Records that were trained on, that were not, and pairs among which a pair's loss is counted."""

Batches = Mapping[str, Sequence[Batch]]
"""Batches of each of ``MEMBERS``, ``OTHERS`` and ``POOL``."""


@torch.no_grad()
def record_scores(model: Any, batches: Batches) -> dict[str, Tensor]:
    """Scores [members + others] by attack, of an image-text model or a classifier; sets eval mode."""
    model.eval()
    asked = [*batches[MEMBERS], *batches[OTHERS]]
    if classifies(model, asked):
        logits = torch.cat([model(batch).logits.cpu() for batch in asked])
        return label_scores(logits, torch.cat([batch["labels"].cpu() for batch in asked]))
    image, text = embed(model, iter(asked))
    return pair_scores(image, text, embed(model, iter(batches[POOL])))


def record_directions(model: Any, batches: Batches, change: Mapping[str, Tensor]) -> Directions:
    """The gradients of the same records' losses (gradients.py), beside ``change``, the change of the model's tensors.

    The parameters that do not require a gradient are left out; sets eval mode.
    """
    model.eval()
    asked = [*batches[MEMBERS], *batches[OTHERS]]
    with torch.no_grad():
        pool = None if classifies(model, asked) else embed(model, iter(batches[POOL]))

    def loss(batch: Batch) -> Tensor:
        output = model(batch)
        if pool is None:
            return -label_scores(output.logits.cpu(), batch["labels"].cpu())[LOSS]
        return -pair_scores(output.image.cpu(), output.text.cpu(), pool)[LOSS]

    return directions(model, asked, loss, change)


@torch.no_grad()
def classifies(model: Any, batches: Sequence[Batch]) -> bool:
    """Whether the model's scores are of findings, and not of pairs."""
    return model(batches[0]).logits is not None
