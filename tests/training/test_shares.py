"""What each of several processes reads, and how gradients travel: without processes, whose exchanges are noted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.towers import client, encoder
from support.two_ranks import Films
from torch import Tensor, nn

from fedvlp.core.types import Batch, Broadcast
from fedvlp.methods import FedAvg
from fedvlp.objectives.convirt import ConVIRT
from fedvlp.training import distributed, local_training
from fedvlp.training.distributed import MeansInBackward
from fedvlp.training.settings import Training
from fedvlp.training.step import Stepper, own_rows
from studies.rivals import FedIoT

RANKS = 4


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """This process is the first of four; the list holds its number."""
    number = [0]
    monkeypatch.setattr(distributed, "together", lambda: True)
    monkeypatch.setattr(distributed, "rank", lambda: number[0])
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    return number


def batches(data: Films) -> list[Batch]:
    return list(data.train_batches(3, 8, torch.Generator().manual_seed(5)))


def test_four_ranks_read_a_quarter_each_of_what_one_reads(ranks: list[int]) -> None:
    """Rows, crops, texts and labels are those of the whole batch that one process draws."""
    alone = Films()
    whole = batches(alone)
    assert alone.read == [8, 8, 8]
    parts: list[list[Batch]] = []
    for ranks[0] in range(RANKS):
        data = Films()
        local_training.share_images(FedAvg(), replace(client(encoder(image_size=32)), data=data), Training())
        parts.append([own_rows(batch) for batch in batches(data)])
        assert data.read == [2, 2, 2]
    for step, batch in enumerate(whole):
        for name, tensor in batch.items():
            joined = torch.cat([part[step][name] for part in parts])
            assert torch.equal(joined.nan_to_num(), tensor.nan_to_num()), name


class Drawing(ConVIRT):
    """A loss that draws something for each batch."""

    def draw(self, batch: Batch, generator: torch.Generator) -> Batch:
        return batch


def test_whole_batches_go_where_they_are_changed_or_gathered(ranks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(method: Any, training: Training = Training(), objective: nn.Module | None = None) -> list[int]:  # noqa: B008
        data = Films()
        local_training.share_images(method, replace(client(encoder(), objective), data=data), training)
        batches(data)
        return data.read

    assert read(FedAvg()) == [2, 2, 2]
    assert read(FedAvg(), Training(gather_negatives=True)) == [8, 8, 8]
    assert read(FedIoT()) == [8, 8, 8], "its batches are its own"
    assert read(FedAvg(), objective=Drawing()) == [8, 8, 8]
    monkeypatch.setattr(distributed, "together", lambda: False)
    assert read(FedAvg()) == [8, 8, 8]


class Exchange:
    """Notes the buckets in the order in which they are sent; all ranks have this one's gradients."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def __call__(self, flat: Tensor, async_op: bool = False) -> Exchange:
        assert async_op
        self.sent.append(flat.numel())
        flat *= RANKS
        return self

    def wait(self) -> None:
        pass


@pytest.fixture
def exchange(ranks: list[int], monkeypatch: pytest.MonkeyPatch) -> Exchange:
    noted = Exchange()
    monkeypatch.setattr(dist, "all_reduce", noted)
    monkeypatch.setattr(distributed, "BUCKET", 100)
    return noted


def network(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))


def test_the_last_layers_gradients_are_sent_while_the_first_are_computed(exchange: Exchange) -> None:
    """Weights of 4, 20 and 25 values: two buckets of at most 100 bytes, the last layer first."""
    model = network(1, 4, 5, 5)
    when: list[tuple[str, int]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: when.append((name, len(exchange.sent))))
    means = MeansInBackward(model.parameters())
    with means.watching():
        means.begin()
        model(torch.ones(1, 1)).sum().backward()
        assert exchange.sent == [25, 24], "both are on their way before the pass is over"
        means.finish()
    assert when == [("2.weight", 0), ("1.weight", 1), ("0.weight", 1)]
    means.begin()
    assert exchange.sent == [25, 24]


def test_gradients_are_means_and_those_that_no_loss_reached_stay_none(exchange: Exchange) -> None:
    model, unused = network(1, 4, 5), nn.Parameter(torch.ones(30))
    model(torch.ones(1, 1)).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    means = MeansInBackward([*model.parameters(), unused])
    with means.watching():
        means.begin()
        model(torch.ones(1, 1)).sum().backward()
        assert exchange.sent == [], "buckets go in one order at every rank: the unused one is first"
        means.finish()
    assert exchange.sent == [24]
    assert unused.grad is None
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_of_plain_micro_batches_only_complete_gradients_are_sent(exchange: Exchange) -> None:
    one = client(encoder())
    training = Training(batch_size=8, micro_batch=2, accumulation="plain")
    step = Stepper(one, training, Broadcast(0, "train", {}), 0)
    batch = next(one.data.train_batches(1, 32, torch.Generator()))
    seen: list[int] = []

    def losses(piece: Batch) -> dict[str, Tensor]:
        seen.append(len(exchange.sent))
        return one.objective(one.model(piece), piece)

    with step.running():
        step(batch, losses)
    assert seen == [0, 0, 0, 0]
    assert len(exchange.sent) > 1
    assert np.sum(exchange.sent) == sum(p.numel() for _, p in one.trainable())
    with step.running():
        step(batch, losses)
    assert seen[4:] == [seen[4]] * 4, "nothing is sent before the last piece"
