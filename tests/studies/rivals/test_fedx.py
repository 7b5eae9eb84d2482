"""FedX (spec 9): contrast and relations by hand, the frozen global model, and what makes it FedAvg."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.films import NT_XENT, world
from support.toy import ADAMW, World, clone, differs, same_bytes
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.client import Client
from fedvlp.core.types import Batch, Broadcast
from fedvlp.methods import FedAvg
from studies.rivals import BYOLConfig, FedX
from studies.rivals.fedx import relation
from studies.rivals.nt_xent import nt_xent

pytestmark = pytest.mark.slow(seconds=5)

PREDICTING = replace(NT_XENT, predictor=True)


def task(objective: Any = NT_XENT, move: float = 0.0, **settings: Any) -> tuple[FedX, Client, Batch, Broadcast]:
    """A site with a batch of 7 films and their views, whose weights are ``move`` away from the received ones."""
    method = FedX(local_steps=1, **settings)
    client = world(method, objective).client("a")
    message = Broadcast(0, "train", clone(client.state()))
    client.set_trainable(lambda name: True)
    with torch.no_grad():
        for _, parameter in client.parameters():
            parameter += move * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    batches = client.data.train_batches(1, 7, torch.Generator().manual_seed(0))
    (batch,) = client.drawn(batches, torch.Generator().manual_seed(1))
    return method, client, batch, message


def test_with_the_global_models_weights_both_contrasts_are_the_same() -> None:
    """Spec 9: z* = z and p = z, so NT-Xent(p, z*') = NT-Xent(z, z'); with other weights they differ."""
    method, client, batch, message = task()
    terms = method.losses(client, batch, message)
    assert terms.keys() == {"contrastive", "nt_xent", "global", "relation"}
    assert terms["global"].item() == pytest.approx(terms["nt_xent"].item(), rel=1e-5)
    method, client, batch, message = task(move=0.1)
    terms = method.losses(client, batch, message)
    assert terms["global"].item() != pytest.approx(terms["nt_xent"].item(), rel=1e-3)


def test_the_relation_by_hand() -> None:
    """Views (1, 0) and (0, 1), reference (1, 0), (0, 1), T = 1: r = (p, 1 - p), r' = (1 - p, p), p = e / (1 + e).

    m = (1/2, 1/2), KL(m || r) = KL(m || r') = -1/2 log(4 p (1 - p)) = 0.1201. Equal views: 0.
    """
    views = torch.eye(2, dtype=torch.float64)[None]  # [1, 2, 2]
    p = math.e / (1 + math.e)
    expected = -0.5 * math.log(4 * p * (1 - p))
    assert expected == pytest.approx(0.1201, abs=1e-4)
    assert relation(views, 5 * views[0], 1.0, 1.0).item() == pytest.approx(expected, abs=1e-12)
    assert relation(views[:, :1].expand(-1, 2, -1), views[0], 1.0, 1.0).item() == pytest.approx(0, abs=1e-12)


def test_targets_have_a_temperature_of_their_own() -> None:
    """Equal views (1, 0): m = softmax(10, 0) at 0.1, r = softmax(1, 0) at 1, the term is KL(m || r)."""
    views = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    m, r = torch.tensor([10.0, 0.0]).double().softmax(0), torch.tensor([1.0, 0.0]).double().softmax(0)
    expected = float((m * (m / r).log()).sum())
    assert relation(views, torch.eye(2, dtype=torch.float64), 1.0, 0.1).item() == pytest.approx(expected, rel=1e-9)


def test_the_terms_from_their_vectors() -> None:
    """Weights, temperatures, the predictor, and which half of the seven films is the reference of which."""
    settings = {
        "contrast_weight": 2.0, "relation_weight": 3.0, "temperature": 0.5, "student_temperature": 0.2,
        "teacher_temperature": 0.3,
    }  # fmt: skip
    method, client, batch, message = task(PREDICTING, 0.1, **settings)
    terms = method.losses(client, batch, message)
    objective: Any = client.objective
    own = objective.projector(client.model(batch).views[:, :, 0])
    predicted = objective.predictor(own)
    assert not torch.allclose(predicted, own)
    taught = method.taught(client, batch, message)
    contrast = 2 * nt_xent(predicted[:, 0], taught[:, 1], 0.1)
    local, shared = (
        3 * relation(own[:3], own[3:, 0], 0.5, 0.2), 3 * relation(predicted[:3], taught[3:, 0], 0.5, 0.3)
    )  # fmt: skip
    assert terms["global"].item() == pytest.approx(contrast.item(), rel=1e-5)
    assert terms["relation"].item() == pytest.approx((local + shared).item(), rel=1e-4)


def test_the_teacher_is_the_received_model_with_its_own_projector_and_has_no_gradient() -> None:
    method, client, batch, message = task(move=0.1)
    before = clone(message.state)
    taught = method.taught(client, batch, message)
    assert not taught.requires_grad
    same_bytes(message.state, before)
    _, received, _, _ = task()
    expected: Tensor = received.objective.project(received.model(batch).views)  # type: ignore[operator]
    torch.testing.assert_close(taught, expected)
    live: Tensor = client.objective.project(client.model(batch).views)  # type: ignore[operator]
    assert not torch.allclose(taught, live)


def test_the_predictor_learns_from_the_global_terms_alone() -> None:
    for settings, learns in (({}, True), ({"contrast_weight": 0.0, "relation_weight": 0.0}, False)):
        method, client, batch, message = task(PREDICTING, **settings)
        torch.stack(list(method.losses(client, batch, message).values())).sum().backward()
        gradients = [p.grad for p in client.objective.predictor.parameters()]  # type: ignore[union-attr]
        assert all((gradient is not None) == learns for gradient in gradients)


def test_without_its_terms_or_without_views_it_is_fedavg_bit_for_bit() -> None:
    off = FedX(local_steps=2, contrast_weight=0.0, relation_weight=0.0)
    expected = world(FedAvg(local_steps=2), NT_XENT).run().state
    same_bytes(world(off, NT_XENT).run().state, expected)
    assert differs(world(FedX(local_steps=2), NT_XENT).run().state, expected)
    for method in (FedX(local_steps=2), off):
        same_bytes(World(method, training=ADAMW).run().state, World(FedAvg(local_steps=2), training=ADAMW).run().state)
    other = BYOLConfig(hidden=16, dim=8)
    same_bytes(world(FedX(local_steps=1), other).run().state, world(FedAvg(local_steps=1), other).run().state)


def test_one_term_of_two() -> None:
    method, client, batch, message = task(contrast_weight=0.0)
    assert method.losses(client, batch, message).keys() == {"contrastive", "nt_xent", "relation"}
    method, client, batch, message = task(relation_weight=0.0)
    assert method.losses(client, batch, message).keys() == {"contrastive", "nt_xent", "global"}


def test_autocast_lowers_no_relation() -> None:
    views = F.normalize(torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)), dim=2)
    reference = views[:, 0].flip(0)
    with torch.autocast("cpu", torch.bfloat16):
        low = relation(views, reference, 0.1, 0.1).item()
    assert low == pytest.approx(relation(views.double(), reference.double(), 0.1, 0.1).item(), rel=1e-4)
