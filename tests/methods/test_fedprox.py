"""FedProx: mu = 0 is FedAvg bit for bit, and the gradient is g + mu (w - w_g)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.toy import ADAMW, Toy, World, clone, differs, same_bytes

from fedvlp.core.method import Method
from fedvlp.core.types import Broadcast, group
from fedvlp.methods import FedAvg, FedProx


def test_mu_0_is_fedavg_bit_for_bit() -> None:
    methods = FedProx(local_steps=3, mu=0.0), FedAvg(local_steps=3), FedProx(local_steps=3, mu=1.0)
    worlds = [World(method, training=ADAMW, model=lambda: Toy(norm=True, dropout=0.2)) for method in methods]
    prox, average, pulled = (world.run() for world in worlds)
    same_bytes(prox.state, average.state)
    assert differs(pulled.state, average.state)
    metrics = [run.history[-1]["sites"]["a"] for run in (prox, pulled)]
    assert ["loss/prox" in m for m in metrics] == [False, True]


def gradients(method: Method, prepare: Callable[[Any], None] = lambda client: None) -> dict[str, torch.Tensor]:
    """The gradients of one step at weights that are 0.1 away from the received ones."""
    client = World(method, model=lambda: Toy(norm=True)).client("a")
    message = Broadcast(0, "train", clone(client.state()))
    prepare(client)
    with torch.no_grad():
        for tensor in client.state().values():
            tensor += 0.1 if tensor.is_floating_point() else 1
    batch = next(client.data.batches("train", 4, drop_last=True))
    sum(method.losses(client, batch, message).values()).backward()  # type: ignore[union-attr]
    return {name: p.grad for name, p in client.parameters() if p.grad is not None}


def test_the_gradient_is_that_of_fedavg_plus_the_pull() -> None:
    """d/dw (mu/2) ||w - w_g||^2 = mu (w - w_g) = 0.5 * 0.1 = 0.05 in every coordinate."""
    plain, pulled = gradients(FedAvg()), gradients(FedProx(mu=0.5))
    assert plain.keys() == pulled.keys()
    for name, gradient in plain.items():
        assert torch.allclose(pulled[name], gradient + 0.05, atol=1e-5), name


def test_what_is_not_trained_is_not_pulled() -> None:
    def freeze(client: Any) -> None:
        client.set_trainable(lambda name: group(name) == "head")

    assert {group(name) for name in gradients(FedProx(mu=0.5), freeze)} == {"head"}


def test_the_term_by_hand() -> None:
    """(mu/2) sum over trainable parameters of 0.1^2 = 0.25 * count * 0.01; running statistics do not count."""
    method = FedProx(mu=0.5)
    client = World(method, model=lambda: Toy(norm=True)).client("a")
    received = {n: t + 0.1 if t.is_floating_point() else t for n, t in clone(client.state()).items()}
    batch = next(client.data.batches("train", 4, drop_last=True))
    count = sum(p.numel() for _, p in client.parameters())
    term = method.losses(client, batch, Broadcast(0, "train", received))["prox"].item()
    assert term == pytest.approx(0.25 * count * 0.01, rel=1e-4)
