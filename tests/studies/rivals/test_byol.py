"""BYOL: the loss by hand, which view predicts which, and a target network that follows and is not trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.films import BYOL, MODEL, Films, drawn, model, world
from torch import Tensor, nn

from fedvlp.core.client import TARGET, Client
from fedvlp.core.types import Batch, Broadcast, VLOutput
from fedvlp.methods import FedAvg, FedProx
from fedvlp.models.dual_encoder import DualEncoder
from studies.rivals import BYOLConfig
from studies.rivals.byol import Target, regression

pytestmark = pytest.mark.slow(seconds=5)


def test_the_regression_by_hand() -> None:
    """(3, 4) and (8, 6): cosine 48 / 50, 2 - 2 cos = 0.08; opposite vectors give 4; the mean of both is 2.04."""
    predicted = torch.tensor([[3.0, 4.0], [1.0, 0.0]], dtype=torch.float64)
    target = torch.tensor([[8.0, 6.0], [-5.0, 0.0]], dtype=torch.float64)
    assert regression(predicted, target).item() == pytest.approx(2.04, abs=1e-12)
    units = (predicted / predicted.norm(dim=1, keepdim=True), target / target.norm(dim=1, keepdim=True))
    assert regression(predicted, target).item() == pytest.approx((units[0] - units[1]).square().sum(1).mean().item())


def prepared(**settings: Any) -> tuple[DualEncoder, Any, Batch]:
    """A model, BYOL for it in training mode, and a batch of four films with their views."""
    encoder = model()
    objective = BYOLConfig(**{"hidden": 16, "dim": 8, **settings}).build(encoder, 0)
    return encoder, objective, drawn(objective, Films(0, 4).content["train"][0])


def test_each_view_predicts_the_targets_vector_of_the_other() -> None:
    """With no predictor and a target that is the model: 2 (2 - 2 cos(z_1, z_2)), where the same view would give 0."""
    encoder, objective, batch = prepared()
    objective.predictor = nn.Identity()
    output = encoder(batch)
    first, second = objective.project(output.views).unbind(1)
    expected = 2 * (2 - 2 * nn.functional.cosine_similarity(first, second)).mean()
    assert expected > 1e-3
    assert objective(output, batch)["byol"].item() == pytest.approx(expected.item(), rel=1e-4)
    same = {**batch, "views": batch["views"][:, :1].expand(-1, 2, -1, -1, -1)}
    assert objective(encoder(same), same)["byol"].item() == pytest.approx(0, abs=1e-5)


def test_no_gradient_reaches_the_target_network() -> None:
    """Its vectors are constants: the gradient is that of a loss against fixed numbers, and its weights have none."""
    encoder, objective, batch = prepared()
    fixed = objective.target(batch["views"])
    assert not fixed.requires_grad
    objective(encoder(batch), batch)["byol"].backward()
    seen = [p.grad.clone() for p in encoder.image_encoder.parameters() if p.grad is not None]
    encoder.zero_grad()
    predicted = objective.predictor(objective.project(encoder(batch).views))
    (regression(predicted[:, 0], fixed[:, 1]) + regression(predicted[:, 1], fixed[:, 0])).backward()
    for gradient, parameter in zip(seen, encoder.image_encoder.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad)
    names = [name for name, _ in objective.named_parameters()]
    assert names
    assert not any(name.startswith("target.") for name in names), "no optimiser, decay or pull reaches it"
    assert any(name.startswith("target.encoder.") for name in objective.state_dict()), "but it is saved"


class Numbers(nn.Module):
    """A weight and a count."""

    def __init__(self, weight: float, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=torch.float64))
        self.register_buffer("count", torch.tensor(count))


def test_the_target_follows_by_its_decay() -> None:
    """Decay 0.9, target 1, model 3: 0.9 + 0.3 = 1.2, then 1.08 + 0.3 = 1.38; counts are copied; 0 is the model."""
    target = Target(*(Numbers(1.0, 5) for _ in range(3)))
    online = tuple(Numbers(3.0, 7) for _ in range(3))
    for expected in (1.2, 1.38):
        target.follow(online, 0.9)
        assert all(t.item() == pytest.approx(expected) for n, t in target.named_buffers() if n.endswith("weight"))
    assert {int(t) for n, t in target.named_buffers() if n.endswith("count")} == {7}
    target.follow(online, 0.0)
    assert {float(t) for n, t in target.named_buffers() if n.endswith("weight")} == {3.0}


def test_the_loop_lets_it_follow_after_every_step() -> None:
    """Two steps of a site: xi_2 = d (d xi_0 + (1 - d) theta_1) + (1 - d) theta_2, by the thetas after each step."""
    thetas: list[Tensor] = []

    class Spy(FedAvg):
        def after_step(self, client: Client, message: Broadcast) -> None:
            thetas.append(client.model.image_alignment.qkv.weight.detach().clone())

    one = world(Spy(local_steps=2), BYOLConfig(hidden=16, dim=8, decay=0.8))
    state = one.server().state
    update = one.site("a").handle(Broadcast(0, "train", state))
    name = TARGET + "alignment.qkv.weight"
    expected = 0.8 * (0.8 * state[name] + 0.2 * thetas[0]) + 0.2 * thetas[1]
    torch.testing.assert_close(update.state[name], expected)
    assert not torch.equal(update.state[name], state[name])


def test_a_proximal_term_does_not_pull_it() -> None:
    """Nor does the term count it: FedProx at the received weights is 0 although the target has moved."""
    method = FedProx(mu=1.0)
    client = world(method, BYOL).client("a")
    message = Broadcast(0, "train", {n: t.clone() for n, t in client.state().items()})
    for name, tensor in client.state().items():
        if name.startswith(TARGET):
            tensor.add_(1)
    batch = next(iter(client.drawn(client.data.train_batches(1, 4, torch.Generator()), torch.Generator())))
    assert method.losses(client, batch, message)["prox"].item() == 0


def test_a_restarted_target_is_the_models_own_function() -> None:
    encoder, objective, batch = prepared()
    other = MODEL.build(5)
    objective.restart(other)
    expected = objective.project(other.train()(batch).views)
    objective.train()
    torch.testing.assert_close(objective.target(batch["views"]), expected)
    assert not torch.allclose(objective.target(batch["views"]), objective.project(encoder(batch).views))


def test_it_normalises_by_the_batch_where_the_model_does_and_has_no_dropout() -> None:
    tower = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    target = Target(tower, nn.Identity(), nn.Identity())
    for mode in (True, False):
        target.train(mode)
        assert [module.training for module in target.encoder.children()] == [mode, False]


def test_terms_without_views_or_reports() -> None:
    encoder, objective, batch = prepared(weight=0.25)
    output = encoder(batch)
    assert list(objective(VLOutput(image=output.image), {"image": batch["image"]})) == []
    quarter, whole = objective(output, batch)["byol"], BYOL.build(model(), 0)(output, batch)["byol"]
    assert quarter.item() == pytest.approx(whole.item() / 4, rel=1e-5)


def test_a_decay_outside_of_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"BYOL: decay 1\.5"):
        BYOLConfig(decay=1.5)
