"""FedFed on image-text pairs (spec 9): what it distils, what leaves a site (nothing, unless asked)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.toy import ADAMW, Pairs, Recorder, World, same_bytes
from torch import Tensor, nn

from fedvlp.core.client import EXTRA
from fedvlp.core.types import Batch, Broadcast, Update
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives.convirt import ConVIRT
from studies.rivals import FedFed
from studies.rivals.vae import DistillerConfig

pytestmark = pytest.mark.slow(seconds=5)

SIDE, D = 16, 8
MODEL = ModelConfig(embedding_dim=D, image_size=SIDE, max_tokens=8, vocabulary=64, head_hidden=16, text_layers=1)
METHOD = FedFed(
    local_steps=1, distil_phases=2, distil_steps=1, share=True, shared=6, image_size=SIDE, embedding_dim=D
)  # fmt: skip
ROUNDS = Rounds(rounds=2, evaluate_every=0)


class Studies(Pairs):
    """Random images [n, 1, 16, 16] and token ids [n, 8]."""

    def __init__(self, seed: int, count: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        image = torch.randn(count, 1, SIDE, SIDE, generator=generator)
        super().__init__(image, torch.randint(2, 64, (count, 8), generator=generator))


def objective() -> nn.Module:
    made = ConVIRT()
    made.add_module("extra", DistillerConfig(channels=4, latent=2).build(MODEL, 0))
    return made


def world(method: Any, **settings: Any) -> World:
    data = {"a": Studies(0, 8), "b": Studies(1, 4)}
    chosen = {"rounds": ROUNDS, "model": lambda: MODEL.build(0), "objective": objective, **settings}
    return World(method, data, ADAMW, **chosen)


def run(method: FedFed, **settings: Any) -> tuple[Any, Recorder]:
    one = world(method, **settings)
    spy = Recorder(one)
    return one.run(spy), spy


def test_phases_and_what_is_trained_in_them() -> None:
    assert METHOD.phases(0) == ("distil-1", "distil-2", "give", "train")
    assert replace(METHOD, share=False).phases(0) == ("distil-1", "distil-2", "train")
    assert METHOD.phases(1) == ("train",)
    assert METHOD.trains("objective.extra.encode.0.weight", "distil-1")
    assert not METHOD.trains("objective.extra.encode.0.weight", "train")


def test_by_default_nothing_but_weights_leaves_a_site() -> None:
    assert FedFed().share is False
    server, spy = run(replace(METHOD, share=False))
    assert server.memory == {}
    for _, reply in spy.replies:
        assert reply.aux == {}
        assert all(
            name in server.state and tensor.shape == server.state[name].shape for name, tensor in reply.state.items()
        )
    assert all(message.aux == {} for _, message in spy.sent)


def test_what_sharing_costs_is_said() -> None:
    """Films of 16 x 16 pixels, each pixel of two residuals at most 4 apart: s = 64, mu = 64 / 0.25 = 256,
    epsilon = 256^2 / 2 + 256 * 4.2649 = 33,860. Without noise there is none; what is not shared costs nothing."""
    said = METHOD.discloses()
    assert "6 pairs of each site" in said
    assert "an epsilon of 3.39e+04 at delta 1e-05, which protects nothing" in said
    assert said.endswith("--set method.share=false keeps the pairs at the site")
    assert "epsilon" not in replace(METHOD, noise=0.0).discloses()
    assert replace(METHOD, share=False).discloses() == ""


def test_what_is_shared_is_residuals_and_embeddings_once() -> None:
    """Six pairs of each site (b has four records, so two come twice), noised; everybody keeps everybody's."""
    one = world(METHOD)
    spy = Recorder(one)
    server = one.run(spy)
    given = {site: reply.state for site, reply in spy.replies if reply.phase == "give"}
    for site, pairs in given.items():
        assert {name: tuple(t.shape) for name, t in pairs.items()} == {"image": (6, 1, SIDE, SIDE), "text": (6, D)}
        records = one.data[site].content["train"][0]
        gap = (pairs["image"][:, None] - records[None]).flatten(2).abs().amax(2)
        assert gap.min() > 0.2, "no image leaves as it is"
    for name in ("image", "text"):
        assert torch.equal(server.memory[name], torch.cat([given["a"][name], given["b"][name]]))
    carrying = [(site, m.round, m.phase) for site, m in spy.sent if m.aux]
    assert carrying == [("a", 0, "train"), ("b", 0, "train")]
    terms = [record["sites"]["a"].keys() for record in server.history if record["phase"] == "train"]
    assert all({"loss/pool", "loss/residual", "loss/contrastive"} <= names for names in terms), "also from memory"


def test_the_noise_is_of_its_size() -> None:
    """Without noise a site would give x - q(x) itself; with it, that plus a deviate of standard deviation 0.25."""
    given = []
    for noise in (0.0, 0.25):
        _, spy = run(replace(METHOD, noise=noise, distil_phases=0, shared=200), rounds=replace(ROUNDS, rounds=1))
        given.append(next(reply.state["image"] for _, reply in spy.replies if reply.phase == "give"))
    assert (given[1] - given[0]).std().item() == pytest.approx(0.25, rel=0.02)


def test_an_image_is_what_is_kept_and_what_is_left() -> None:
    """Spec 9: noise 0 and KL 0 -> x_s + q(x) = x exactly: the given residual and the reconstruction add up."""
    one = world(replace(METHOD, noise=0.0, kl=0.0))
    spy = Recorder(one)
    one.run(spy)
    message = next(m for site, m in spy.sent if (site, m.phase) == ("b", "give"))
    client = one.client("b")
    client.load(message.state)
    records = one.data["b"].content["train"][0]
    kept, _ = client.objective.extra(records)  # type: ignore[operator]
    given = next(r.state["image"] for site, r in spy.replies if (site, r.phase) == ("b", "give"))
    sums = (given[:, None] + kept[None] - records[None]).flatten(2).abs().amax(2).amin(1)  # [6]: some record fits
    torch.testing.assert_close(sums, torch.zeros(6), rtol=0, atol=1e-5)


def test_the_loss_of_distilling_by_hand() -> None:
    """recon |x - q|^2 + residual L(x - q, t) + plain L(x, t) + kl KL, noise 0, with a distiller that answers x / 2."""

    class Half(nn.Module):
        def forward(self, images: Tensor, sample: bool = False) -> tuple[Tensor, Tensor]:
            return images / 2, torch.tensor(3.0)

    one = world(replace(METHOD, noise=0.0))
    client = one.client("a")
    client.objective.extra = Half()
    client.model.eval()
    batch: Batch = next(one.data["a"].batches("train", 4, drop_last=True))
    terms = METHOD.__class__(**{**vars(METHOD), "noise": 0.0}).losses(client, batch, Broadcast(0, "distil-1", {}))
    whole = client.objective(client.model(batch), batch)["contrastive"]
    left = client.objective(client.model({**batch, "image": batch["image"] / 2}), batch)["contrastive"]
    expected = {
        "contrastive": 0.4 * whole, "recon": 5 * (batch["image"] / 2).square().mean(), "kl": torch.tensor(0.015),
        "residual": 2 * left,
    }  # fmt: skip
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value)


@pytest.mark.parametrize(("phase", "learns"), [("distil-1", True), ("train", False)])
def test_the_distiller_learns_while_distilling_alone(phase: str, learns: bool) -> None:
    """Every parameter may learn here: ``train`` spares q by its loss, not only because the loop has frozen it."""
    client = world(METHOD).client("a")
    client.set_trainable(lambda name: True)
    batch: Batch = next(client.data.batches("train", 4, drop_last=True))
    terms = METHOD.losses(client, batch, Broadcast(0, phase, {}))
    own = [parameter for name, parameter in client.trainable() if name.startswith(EXTRA)]
    gradients = torch.autograd.grad(torch.stack(list(terms.values())).sum(), own, allow_unused=True)
    assert len(gradients) > 0
    assert [gradient is not None and bool(gradient.any()) for gradient in gradients] == [learns] * len(gradients)


def test_without_a_distiller_it_is_fedavg() -> None:
    method = FedFed(local_steps=1, distil_phases=0)
    same_bytes(
        world(method, objective=ConVIRT).run().state, world(FedAvg(local_steps=1), objective=ConVIRT).run().state
    )


def test_sharing_without_a_distiller_is_refused() -> None:
    server = world(METHOD, objective=ConVIRT, rounds=replace(ROUNDS, quorum=1))
    with pytest.raises(Exception, match="0 valid updates"):
        server.run()


def test_a_site_that_failed_in_the_first_round_is_sent_the_pool_again() -> None:
    """Until it has replied once: it may never have had it."""

    def away(site: str, message: Broadcast, reply: Any) -> Any:
        return ConnectionError("away") if (site, message.round, message.phase) == ("b", 0, "train") else reply

    one = world(METHOD, rounds=Rounds(rounds=3, quorum=1, evaluate_every=0))
    spy = Recorder(one, away)
    one.run(spy)
    carrying = [(site, m.round) for site, m in spy.sent if m.aux]
    assert carrying == [("a", 0), ("b", 0), ("b", 1)]


def test_pairs_of_another_shape_are_dropped_and_named() -> None:
    def larger(site: str, message: Broadcast, reply: Any) -> Any:
        if message.phase == "give" and site == "b" and isinstance(reply, Update):
            return replace(reply, state={name: torch.cat([t, t]) for name, t in reply.state.items()})
        return reply

    one = world(METHOD)
    server = one.run(Recorder(one, larger))
    dropped = next(record["dropped"] for record in server.history if record["phase"] == "give")
    assert dropped.keys() == {"b"}
    assert "expected (6, 1, 16, 16)" in dropped["b"]


@pytest.mark.parametrize(("name", "factor"), [("image", 1e30), ("text", 2.0)])
def test_pairs_that_would_spoil_the_pool_are_dropped_and_named(name: str, factor: float) -> None:
    """Every site trains on the pool, so one film of 1e30 would end the run for all; honest pairs pass."""

    def spoilt(site: str, message: Broadcast, reply: Any) -> Any:
        if message.phase == "give" and site == "b" and isinstance(reply, Update):
            return replace(reply, state={**reply.state, name: reply.state[name] * factor})
        return reply

    one = world(METHOD)
    server = one.run(Recorder(one, spoilt))
    dropped = {record["phase"]: record["dropped"] for record in server.history if record["round"] == 0}
    assert dropped.pop("give").keys() == {"b"}
    assert not any(dropped.values())
