"""FedMOON: the contrast between models by hand, what it pulls towards, and what is FedAvg all the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.towers import client as dual_client
from support.towers import encoder
from support.toy import ADAMW, Recorder, Toy, World, clone, differs, pairs, same_bytes
from torch.nn import functional as F

from fedvlp.core.types import Broadcast, State, VLOutput
from fedvlp.federation.loop import Rounds
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import FedAvg, FedMOON


def vectors(*rows: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def test_the_contrast_by_hand() -> None:
    """T = 0.5. Row 1: cosines 1 with z_g and 0 with z_p, log(1 + e^-2); row 2: 0.6 and -1, log(1 + e^-3.2).

    Text: z is z_p and orthogonal to z_g, log(1 + e^2). Lengths do not matter.
    """
    z = VLOutput(image=vectors((1, 0), (0, 2)), text=vectors((1, 0)))
    received = VLOutput(image=vectors((3, 0), (4, 3)), text=vectors((0, 5)))
    last = VLOutput(image=vectors((0, 1), (0, -1)), text=vectors((7, 0)))
    image, text = (float(term) for term in FedMOON().contrasts(z, received, last))
    assert image == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.exp(-3.2))) / 2)
    assert text == pytest.approx(math.log1p(math.exp(2)))
    (alone,) = FedMOON(temperature=2.0).contrasts(VLOutput(text=z.text), received, last)
    assert float(alone) == pytest.approx(math.log1p(math.exp(0.5)))


def test_its_gradient_draws_towards_the_received_model_and_away_from_the_last() -> None:
    z = vectors((1, 0)).requires_grad_()
    (term,) = FedMOON().contrasts(VLOutput(image=z), VLOutput(image=vectors((1, 1))), VLOutput(image=vectors((1, -1))))
    term.backward()
    assert z.grad is not None
    assert z.grad[0, 1] < 0, "a step against the gradient turns z to z_g"


def ended(method: Any, rounds: int = 3, **options: Any) -> Any:
    world = World(
        method, training=ADAMW, rounds=Rounds(rounds=rounds, evaluate_every=0),
        model=lambda: Toy(norm=True, dropout=0.2), **options,
    )  # fmt: skip
    return world.run()


def test_mu_0_and_the_first_round_are_fedavg_bit_for_bit() -> None:
    """In the first round z_p is z_g, so the term is log 2 and has no gradient; then it has."""
    same_bytes(ended(FedMOON(local_steps=2, mu=0.0)).state, ended(FedAvg(local_steps=2)).state)
    first = ended(FedMOON(local_steps=2, mu=5.0), rounds=1)
    same_bytes(first.state, ended(FedAvg(local_steps=2), rounds=1).state)
    assert first.history[0]["sites"]["a"]["loss/model_contrast"] == pytest.approx(5 * math.log(2))
    assert differs(ended(FedMOON(local_steps=2, mu=5.0)).state, ended(FedAvg(local_steps=2)).state)


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_on_the_dual_encoder_three_equal_models_give_log_2(norm: str, dropout: float) -> None:
    """Also when the model that trains has dropout, and normalises by the batch as its anchors do (spec Z1, Z2)."""
    one = dual_client(encoder(head_norm=norm, dropout=dropout))
    message = Broadcast(0, "train", clone(one.state()))
    one.memory = {name: t for name, t in clone(one.state()).items() if not name.startswith("objective.")}
    one.model.train()
    batch = next(one.data.batches("train", 4, drop_last=True))
    terms = FedMOON(mu=2.0).losses(one, batch, message)
    assert float(terms["model_contrast"].detach()) == pytest.approx(2 * math.log(2), rel=1e-6)


def test_z_g_is_of_the_received_model_and_z_p_of_the_site_s_last(tmp_path: Path) -> None:
    """By hand from the weights: the site's memory after round 0 is z_p's model in round 1, not the mean it received."""
    world = World(FedMOON(local_steps=2), folder=tmp_path)
    spy = Recorder(world)
    world.run(spy)
    trained = {(reply.round, site): reply.state for site, reply in spy.replies}
    memory = SiteMemory(tmp_path / "sites" / "b").before((1, 0))
    model: State = {n: t for n, t in trained[0, "b"].items() if not n.startswith("objective.")}
    same_bytes(memory, model)
    received = next(m.state for site, m in spy.sent if (m.round, site) == (1, "b"))
    client = World(FedMOON()).client("b")
    client.memory = memory
    client.load(trained[1, "b"])
    batch = next(client.data.batches("train", 4, drop_last=True))
    seen = FedMOON().losses(client, batch, Broadcast(1, "train", received))["model_contrast"]
    outputs = []
    for state in (trained[1, "b"], received, trained[0, "b"]):
        client.load(state)
        outputs.append(client.model(batch))
    z, z_g, z_p = outputs
    by_hand = [
        -torch.log_softmax(torch.stack([F.cosine_similarity(a, b), F.cosine_similarity(a, c)]) / 0.5, 0)[0].mean()
        for a, b, c in ((z.image, z_g.image, z_p.image), (z.text, z_g.text, z_p.text))
    ]
    torch.testing.assert_close(seen, torch.stack(by_hand).mean())


def test_an_image_only_site_contrasts_its_images() -> None:
    data = {"a": pairs(0), "b": pairs(1)}
    data["b"].modalities = ("image",)

    class FirstValue(torch.nn.Module):
        def forward(self, output: VLOutput, batch: Any) -> dict[str, torch.Tensor]:
            return {"first": output.image[:, 0].mean()}  # type: ignore[index]

    server = World(FedMOON(local_steps=2, mu=1.0), data, objective=FirstValue).run()
    assert all("loss/model_contrast" in server.history[1]["sites"][site] for site in "ab")


def test_nothing_but_fedavg_s_tensors_leave_a_site() -> None:
    world = World(FedMOON(local_steps=1))
    spy = Recorder(world)
    server = world.run(spy)
    assert all(reply.state.keys() == server.state.keys() and not reply.scalars for _, reply in spy.replies)
    assert server.memory == {}
