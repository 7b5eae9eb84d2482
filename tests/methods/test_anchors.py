"""Anchors and teachers on the real dual encoder (spec Z1, Z2): with the model's weights they are its own function."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.towers import client, encoder, records
from support.toy import SGD, World, clone, same_bytes
from torch import Tensor

from fedvlp.core.client import BatchNorm, Client
from fedvlp.core.method import Method
from fedvlp.core.seeds import seed
from fedvlp.core.types import Batch, Broadcast
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedDRA, FedRGB
from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.objectives.convirt import ConVIRT, info_nce

DRA = FedDRA(local_steps=2, align_steps=3, mu=5.0, dro_batch=4)
RGB = FedRGB(local_steps=2, aligner_steps=2, beta=2.0, dro_batch=4)
HEADS = ("batch", "layer")


def tower_dropout(model: DualEncoder, share: float) -> DualEncoder:
    """``model`` with dropout in the blocks of both encoders, and none after them."""
    for tower in (model.image_encoder, model.text_encoder):
        for module in tower.modules():
            if hasattr(module, "fused_attn"):
                module.dropout = share  # type: ignore[assignment]
    return model


def first_step(method: Method, one: Client, phase: str) -> tuple[Broadcast, Batch, dict[str, Tensor]]:
    """What the loss is made of at the first step of a phase, every weight as it was received."""
    message = Broadcast(0, phase, clone(one.state()))
    one.set_trainable(lambda name: method.trains(name, phase))
    batch = next(one.data.batches("train", 8, drop_last=True))
    return message, batch, method.losses(one, batch, message)


def vanishes(term: Tensor, one: Client) -> None:
    """The term is 0, and so is its gradient on every parameter."""
    assert term.item() == 0.0
    parameters = [parameter for _, parameter in one.trainable()]
    gradients = torch.autograd.grad(term, parameters, allow_unused=True, retain_graph=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)
    assert any(gradient is not None for gradient in gradients)


@pytest.mark.parametrize("head_norm", HEADS)
@pytest.mark.parametrize("phase", ["align", "joint"])
def test_b3_of_the_real_model(head_norm: str, phase: str) -> None:
    one = client(encoder(head_norm=head_norm))
    vanishes(first_step(DRA, one, phase)[2]["constraint"], one)


@pytest.mark.parametrize("head_norm", HEADS)
def test_b3_with_dropout_in_frozen_towers(head_norm: str) -> None:
    one = client(tower_dropout(encoder(head_norm=head_norm), 0.3))
    vanishes(first_step(DRA, one, "align")[2]["constraint"], one)


def test_an_anchor_has_no_dropout() -> None:
    """In the joint phase the model has: the target is the same twice, the model's output is not."""
    one = client(encoder(dropout=0.3))
    message, batch, terms = first_step(DRA, one, "joint")
    assert terms["constraint"].item() > 0
    first, second = (one.anchor(message.state)(batch).image for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(one.model(batch).image, one.model(batch).image)


@pytest.mark.parametrize("phase", ["local", "aligner"])
@pytest.mark.parametrize("head_norm", HEADS)
def test_a_teacher_that_is_the_model_pulls_nowhere(head_norm: str, phase: str) -> None:
    """FedRGB: al_i = al* in ``local``, f' = f in ``aligner``."""
    one = client(encoder(head_norm=head_norm))
    one.memory = clone({name: tensor for name, tensor in one.state().items() if "encoder" not in name})
    term = "guide" if phase == "local" else "consistency"
    vanishes(first_step(RGB, one, phase)[2][term], one)


@pytest.mark.parametrize("method", [DRA, RGB])
def test_the_statistics_of_the_received_model_are_not_touched(method: Method) -> None:
    for phase in method.phases(0):
        one = client(encoder(head_norm="batch"))
        one.memory = clone({name: tensor for name, tensor in one.state().items() if "encoder" not in name})
        before = clone(one.state())
        message, batch, _ = first_step(method, one, phase)
        method.losses(one, batch, message)
        same_bytes(message.state, before)
        assert not torch.equal(one.state()["image_head.1.running_mean"], before["image_head.1.running_mean"])


def test_an_anchor_normalises_as_the_model_does() -> None:
    """By the batch where the model's layer is in train mode, by the received statistics where it is not."""
    one = client(encoder(head_norm="batch"))
    layers = [module for module in one.model.modules() if isinstance(module, BatchNorm)]
    assert len(layers) >= 2
    state, batch = clone(one.state()), next(one.data.batches("train", 8, drop_last=True))
    for mode in (True, False, True):
        for layer in layers:
            layer.train(mode)
        with torch.no_grad():
            expected = copy.deepcopy(one.model)(batch)
            assert torch.equal(one.anchor(state)(batch).image, expected.image)
    one.model.train()
    frozen = one.frozen(state)(batch).image
    assert torch.equal(frozen, copy.deepcopy(one.model).eval()(batch).image)
    assert not torch.equal(frozen, one.anchor(state)(batch).image)


@pytest.mark.parametrize("phase", ["align", "joint"])
@pytest.mark.parametrize("head_norm", HEADS)
def test_b4_of_the_real_model(head_norm: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of mu L_C on an embedding is 2 mu (z - z*) / B, both unit vectors."""
    one = client(encoder(head_norm=head_norm))
    message = Broadcast(0, phase, clone(one.state()))
    one.set_trainable(lambda name: DRA.trains(name, phase))
    with torch.no_grad():
        for name, parameter in one.parameters():
            parameter += (
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * ("head" in name)
            )
    batch = next(one.data.batches("train", 8, drop_last=True))
    project, seen = one.model.project, []

    def remembered(encoded: Any) -> Any:
        output = project(encoded)
        output.image.retain_grad()
        output.text.retain_grad()
        seen.append(output)
        return output

    one.anchor(message.state)  # made before, so that it has a method of its own

    monkeypatch.setattr(one.model, "project", remembered)
    DRA.losses(one, batch, message)["constraint"].backward()
    monkeypatch.undo()
    (output,) = seen
    target = one.anchor(message.state)(batch)
    for z, anchor in ((output.image, target.image), (output.text, target.text)):
        torch.testing.assert_close(z.grad, 2 * DRA.mu * (z - anchor).detach() / 8, rtol=1e-4, atol=1e-6)


def by_hand(model: DualEncoder, rounds: int) -> dict[str, Tensor]:
    """FedDRA with one site written out: an anchor frozen at the start of each stage, in train mode but for dropout."""
    data = records(dtype=torch.float64)
    for round in range(rounds):
        for index, (stage, steps) in enumerate((("align", DRA.align_steps), ("joint", DRA.local_steps))):
            model.train()
            if stage == "align":
                model.image_encoder.eval()
                model.text_encoder.eval()
            anchor = copy.deepcopy(model)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(stage == "joint" or "encoder" not in name)
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.SGD(parameters, lr=SGD.lr)
            generator = torch.Generator().manual_seed(seed(0, "a", round, index, "batches"))
            for batch in data.train_batches(steps, SGD.batch_size, generator):
                output = model(batch)
                with torch.no_grad():
                    target = anchor(batch)
                distance = ((output.image - target.image) ** 2).sum(1) + ((output.text - target.text) ** 2).sum(1)
                optimizer.zero_grad()
                (sum(info_nce(output.image, output.text, 0.07)) + DRA.mu * distance.mean()).backward()  # type: ignore
                optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("head_norm", HEADS)
def test_b5_of_the_real_model(head_norm: str) -> None:
    """One site: the trajectory of two-stage training without a federation, in float64 so that rounding stays small."""

    def fresh() -> DualEncoder:
        return encoder(head_norm=head_norm, dtype=torch.float64)

    world = World(
        replace(DRA, rho=0.0), {"a": records(dtype=torch.float64)}, SGD, Rounds(rounds=2, evaluate_every=0),
        model=fresh, objective=ConVIRT,
    )  # fmt: skip
    state = world.run().state
    expected, start = by_hand(fresh(), rounds=2), fresh().state_dict()
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(
                state[name], tensor, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )
    moved = [name for name in expected if not torch.equal(state[name], start[name])]
    assert any("encoder" in name for name in moved)
    assert any("head" in name for name in moved)
