"""Held-out figures are those of the model in eval mode, in whatever mode it comes, and measuring leaves it unchanged.

The model has what differs between the modes: dropout in its blocks, and heads with BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.towers import Records
from support.toy import clone, same_bytes
from torch import Tensor

from fedvlp.core.client import Client, named_state
from fedvlp.core.types import Batch
from fedvlp.evaluation import zero_shot as protocol
from fedvlp.evaluation.classification import AUC, predict
from fedvlp.evaluation.retrieval import embed
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.objectives.bce import BCE

CLASSES = ("Edema", "Pneumonia")
MODEL = MultimodalConfig(
    embedding_dim=8, image_size=16, max_tokens=6, vocabulary=50, head_hidden=16, alignment=True, labels=CLASSES
)  # fmt: skip


class Labelled(Records):
    """Records of which every other one has each finding."""

    def _batch(self, split: str, rows: Tensor) -> Batch:
        return {**super()._batch(split, rows), "labels": torch.stack([rows % 2, 1 - rows % 2], dim=1).float()}


def trainee() -> Client:
    """A client in training mode with 12 test records."""
    generator = torch.Generator().manual_seed(3)
    content = torch.randn(12, 1, 16, 16, generator=generator), torch.randint(2, 50, (12, 6), generator=generator)
    model = MODEL.build(seed=1).train()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.dropout = 0.5  # type: ignore[assignment]
    return Client("a", 0, model, BCE(), Labelled(*content, test=content))


def stuck(training: bool) -> Client:
    """The same, in a mode that nothing can change."""
    client = trainee()
    client.model.train(training)
    client.model.train = lambda mode=True: client.model  # what eval() calls too
    return client


def retrieval(client: Client) -> list[Any]:
    return [vectors.tolist() for vectors in embed(client.model, client.data.batches("test", 5, drop_last=False))]


def classification(client: Client) -> list[Any]:
    batches = client.data.batches("test", 5, drop_last=False)
    return [found.tolist() for found in predict(client.model, client.objective, batches)]


def zero_shot(client: Client) -> list[Any]:
    """The scores from which accuracy and AUC are counted, and the accuracy."""
    scores: list[Any] = []

    def noting(found: Tensor, targets: Tensor, names: tuple[str, ...]) -> AUC:
        scores.append(found.tolist())
        return AUC({}, (), ())

    states = {protocol.GLOBAL: clone(named_state(client.model, client.objective))}
    settings = protocol.ZeroShot(CLASSES, prompts=2, seeds=(0,), batch_size=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "auc", noting)
        results, _ = protocol.zero_shot(settings, client, states, {"s": client.data}, CLASSES)
    return [scores, [result.accuracy for result in results]]


MEASURES = pytest.mark.parametrize("measure", [retrieval, classification, zero_shot])


@MEASURES
def test_figures_are_those_of_eval_mode_and_the_same_twice(measure: Callable[[Client], list[Any]]) -> None:
    client = trainee()
    once, again = measure(client), measure(client)
    assert once == again
    assert once == measure(stuck(training=False))
    assert once != measure(stuck(training=True)), "the modes differ on these records"


@MEASURES
def test_weights_and_running_statistics_stay(measure: Callable[[Client], list[Any]]) -> None:
    client, other = trainee(), stuck(training=True)
    before = clone(client.state())
    measure(client)
    same_bytes(clone(client.state()), before)
    measure(other)
    moved = [name for name, tensor in other.state().items() if not torch.equal(tensor, before[name])]
    assert any("running_mean" in name for name in moved), "in training mode these records move the statistics"


def test_no_graph_is_kept() -> None:
    """A graph over a whole split would hold every activation of it."""
    client = trainee()
    batches = [list(client.data.batches("test", 5, drop_last=False)) for _ in range(2)]
    found = (*embed(client.model, iter(batches[0])), *predict(client.model, client.objective, iter(batches[1])))
    assert [tensor.requires_grad for tensor in found] == [False] * 4
