"""Training by which an audit plants what its attacks must find: of a client, on batches that are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.client import Client
from fedvlp.core.types import Batch
from fedvlp.evaluation.audit.membership import TEMPERATURE


def own_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """CLIP's loss of an image-text model's output; of a classifier's, cross-entropy over labels that are 1 or 0."""
    if output.logits is not None:
        labels = batch["labels"].to(output.logits.device)
        known = (labels == 0) | (labels == 1)
        target = torch.where(known, labels, 0.0)
        return F.binary_cross_entropy_with_logits(output.logits, target, weight=known.float())
    scores = output.image @ output.text.T / TEMPERATURE
    own = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def train_on(client: Client, batches: Iterable[Batch], optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimiser on each batch."""
    for batch in batches:
        loss = own_loss(client.model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def joined(batches: list[Batch]) -> Batch:
    """One batch of several; reports are padded to the longest."""
    longest = max(batch["text"].shape[1] for batch in batches)
    films = torch.cat([batch["image"] for batch in batches])
    padded = {
        name: torch.cat([F.pad(batch[name], (0, longest - batch[name].shape[1])) for batch in batches])
        for name in ("text", "text_mask")
    }
    return {"image": films, **padded}
