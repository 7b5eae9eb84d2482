"""Membership of an outgoing update: what a model needs of the records that it is measured on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.toy import Pairs, Toy, pairs

from fedvlp.core.client import Client
from fedvlp.core.types import Batch
from fedvlp.evaluation.audit.one_update import UnmeasuredError, strongest
from fedvlp.objectives.convirt import ConVIRT

LABELS = 2


class Labelled(Pairs):
    """Every record has findings; those of ``silent`` splits have no report."""

    silent: tuple[str, ...] = ()

    def batches(self, split: str, *given: Any, **named: Any) -> Iterator[Batch]:
        return super().batches(split, *given, **named) if split in self.sizes else iter(())

    def _batch(self, split: str, rows: torch.Tensor) -> Batch:
        batch = super()._batch(split, rows) | {"labels": (rows[:, None] + torch.arange(LABELS)) % 2}
        return {name: tensor for name, tensor in batch.items() if name != "text" or split not in self.silent}


def measured(model: Toy, silent: tuple[str, ...]) -> float:
    """The area for an update of noise, on 40 records that were trained on and 40 of the validation split."""
    held = pairs(1, 40).content["train"]
    data = Labelled(*pairs(0, 40).content["train"], val=held)
    data.silent = silent
    client = Client("a", 0, model, ConVIRT(), data)
    before = {name: tensor.detach().clone() for name, tensor in client.state().items()}
    noise = torch.Generator().manual_seed(0)
    sent = {name: tensor + 0.01 * torch.randn(tensor.shape, generator=noise) for name, tensor in before.items()}
    return strongest(client, before, sent, range(40), resamples=20).area.value


def test_pairs_cannot_be_measured_without_reports_although_the_records_have_labels() -> None:
    """It ended in a TypeError, of which the site's log says nothing that helps."""
    with pytest.raises(UnmeasuredError, match="records lack an image or a report"):
        measured(Toy(), silent=("val",))
    assert 0 <= measured(Toy(), silent=()) <= 100


def test_a_classifier_is_measured_on_its_labels() -> None:
    assert 0 <= measured(Toy(labels=LABELS), silent=("val",)) <= 100
