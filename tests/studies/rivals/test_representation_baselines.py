"""FedMD, FedET, FedGEMS and FedIoT: what each adds, by hand, and the identities of spec 9."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.toy import SGD, Pairs, World, aggregate, clone, differs, pairs, same_bytes, three_sites

from fedvlp.core.types import Broadcast, Update, VLOutput
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from fedvlp.methods.ensemble import DISTIL, GLOBAL, PUBLIC, PublicEnsemble
from fedvlp.methods.math.contrast import representations
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from studies.rivals import FedET, FedGEMS, FedIoT, FedMD
from studies.rivals.fedmd import CONSENSUS

pytestmark = pytest.mark.slow(seconds=5)

STEPS: dict[str, Any] = {"local_steps": 2, "local_epochs": 1, "server_steps": 2}


def world(method: Any, **options: Any) -> World:
    return World(method, **{"public": pairs(99, 8), "rounds": Rounds(rounds=2, evaluate_every=0), **options})


def log_weights(method: PublicEnsemble, sent: torch.Tensor) -> torch.Tensor:
    made = world(method)
    return method.log_weights(made.server(), Update("a", 0, "train", 1, {"image": sent}), "image", sent)


# FedMD


def test_fedmd_of_one_site_has_its_representations_as_consensus() -> None:
    made = world(FedMD(**STEPS), data={"a": pairs(0, 8)}, rounds=Rounds(rounds=1, evaluate_every=0))
    server = made.server()
    server.phase = "train"
    made.method.prepare(server)
    update = made.site("a").handle(made.method.broadcast(server, "a"))
    aggregate(made.method, server, [update], "train")
    same_bytes({n: server.memory[CONSENSUS + n] for n in ("image", "text")}, update.state)
    same_bytes(made.method.broadcast(server, "a").aux, update.state)


def test_fedmd_digests_the_consensus_first_and_then_revisits_its_records() -> None:
    method = FedMD(**{**STEPS, "local_epochs": 2})
    client, teachers = world(method).client("a"), {"image": torch.zeros(8, 4)}
    batches = method.batches(client, Broadcast(0, "train", {}, teachers), SGD.batch_size, torch.Generator())
    assert [PUBLIC + "row" in batch for batch in batches] == [True, True, False, False] * 2
    first = method.batches(client, Broadcast(0, "train", {}), SGD.batch_size, torch.Generator())
    assert [PUBLIC + "row" in batch for batch in first] == [False] * 4, "no consensus before the first round"


def test_digests_by_hand() -> None:
    """(1, 0) against (0, 1): the squared distance is 2; both modalities add up, times the weight."""
    for norm in ["mse", "squared", "l2"]:
        for kind in [FedMD, FedGEMS]:
            method = kind(digest=0.5, kd_norm=norm)
            own, target = torch.tensor([[1.0, 0.0]]), torch.tensor([[9.0, 9.0], [0.0, 1.0]])
            message = Broadcast(0, "train", {}, {"image": target, "text": target})
            losses = method.public_losses(
                world(method).client("a"), VLOutput(own, own), {"row": torch.tensor([1])}, message
            )
            assert {name: term.item() for name, term in losses.items()} == {"digest": 2.0}


def test_a_digest_is_on_the_scale_of_the_servers_distillation() -> None:
    """With equal weights and targets a site is pulled as strongly as the server, whatever d is."""
    method = FedMD(digest=3.0, kd_weight=3.0, kd_norm="squared")
    client, target = world(method).client("server"), {"image": units(1), "text": units(2)}
    (batch,) = client.public.batches("train", 8, drop_last=False)
    distilled = method.losses(client, batch, Broadcast(0, DISTIL, {}, target))
    digested = method.public_losses(client, client.model(batch), batch, Broadcast(0, "train", {}, target))
    assert digested["digest"].item() == pytest.approx(sum(term.item() for term in distilled.values()))


def units(seed: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)), dim=1)


# FedET


def test_fedet_weighs_by_variance() -> None:
    """Entries (1, -1) have variance 1, (3, -3) variance 9."""
    sent = torch.tensor([[1.0, -1.0], [3.0, -3.0]])
    assert log_weights(FedET(), sent).exp().tolist() == pytest.approx([1.0, 9.0])


def test_fedet_with_equal_variances_is_the_mean() -> None:
    method = FedET(**STEPS)
    one = torch.nn.functional.one_hot(torch.arange(8) % 4, 4).float()
    two = one.roll(1, 1)
    assert torch.allclose(log_weights(method, one), log_weights(method, two))


# FedGEMS


def test_fedgems_weighs_by_inverse_entropy() -> None:
    """Softmax of (0, 0) is (1/2, 1/2), entropy log 2; of (log 3, 0) it is (3/4, 1/4)."""
    sent = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    entropy = [math.log(2), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert log_weights(FedGEMS(), sent).tolist() == pytest.approx([1 / h for h in entropy])


def test_fedgems_with_equal_entropies_is_the_mean() -> None:
    method = FedGEMS(**STEPS)
    one = torch.nn.functional.one_hot(torch.arange(8) % 4, 4).float()
    assert torch.allclose(log_weights(method, one), log_weights(method, one.roll(1, 1)))


def test_fedgems_keeps_what_the_server_matches_rightly() -> None:
    """The server's images 0 and 1 are swapped, 2 is right: its own representation stays the target for 2 alone."""
    method = FedGEMS(**STEPS)
    server = world(method).server()
    eye, combined = torch.eye(3), {"image": torch.full((3, 3), 7.0)}
    server.memory = {GLOBAL + "image": eye[[1, 0, 2]], GLOBAL + "text": eye}
    assert method.targets(server, combined)["image"].tolist() == [[7.0] * 3, [7.0] * 3, [0.0, 0.0, 1.0]]


def test_fedgems_teaches_the_servers_representations() -> None:
    method = FedGEMS(**STEPS)
    made = world(method)
    server = made.server()
    server.phase = "train"
    method.prepare(server)
    client = made.client("server")
    client.load(server.state)
    same_bytes(method.broadcast(server, "a").aux, representations(client, ("image", "text")))
    assert not any(name.startswith(CONSENSUS) for name in made.run().memory)


# FedIoT


def lone(seed: int, count: int, modality: str) -> Pairs:
    data = pairs(seed, count)
    data.modalities = (modality,)
    return data


def test_fediot_of_paired_sites_with_equal_weights_is_fedavg() -> None:
    """Bit for bit, any alpha: all are multimodal; without the public set's batches."""
    method = FedIoT(local_steps=2, share_public=False)
    same_bytes(world(method).run().state, world(FedAvg(local_steps=2)).run().state)


@pytest.mark.parametrize(("alpha", "weights"), [(1.0, (2, 6)), (100.0, (200, 6))])
def test_fediot_averages_each_modality_over_those_that_have_it(alpha: float, weights: tuple[int, int]) -> None:
    """a has pairs, c images: images are (alpha 2 a + 6 c) / (alpha 2 + 6), texts are a's."""
    made = world(FedIoT(alpha=alpha), data={"a": pairs(0, 2), "c": lone(1, 6, "image")})
    server = made.server()
    server.phase = "train"
    ones = {name: torch.ones_like(t) for name, t in made.method.expects(server, "a").state.items()}
    threes = {name: 3 * torch.ones_like(t) for name, t in made.method.expects(server, "c").state.items()}
    assert ones.keys() == server.state.keys()
    assert threes.keys() == {name for name in server.state if not name.startswith("text")}
    aggregate(made.method, server, [Update("a", 0, "train", 2, ones), Update("c", 0, "train", 6, threes)], "train")
    expected = (weights[0] * 1 + weights[1] * 3) / sum(weights)
    for name, tensor in server.state.items():
        wanted = 1.0 if name.startswith("text") else expected
        assert torch.allclose(tensor, torch.full_like(tensor, wanted)), name


def labelled(seed: int, modality: str) -> Pairs:
    data = lone(seed, 8, modality)
    data.labels = torch.eye(3)[torch.arange(8) % 3]
    return data


@pytest.mark.parametrize("spaces", ["disjoint", "shared"])
def test_fediot_sends_and_averages_only_what_a_site_trained(spaces: str) -> None:
    """Paired sites have no classifier in their update, the others no scale of pairs: none resets another's."""
    data = {"a": pairs(0, 8), "c": labelled(1, "image"), "d": labelled(2, "text")}
    objective = CreamFLTaskConfig(classes=4, dim=4, label_spaces=spaces).build
    made = world(FedIoT(local_steps=2), data=data, objective=objective)
    server = made.server()
    server.phase, before = "train", clone(server.state)
    updates = {}
    for name in data:
        update = made.site(name).handle(made.method.broadcast(server, name))
        updates[name] = replace(update, state=clone(update.state))  # the sites share one model
    of_image, of_text = ("weight", "weight") if spaces == "shared" else ("image_weight", "text_weight")
    own = {"a": {"scale", "shift"}, "c": {of_image}, "d": {of_text}}
    for name, update in updates.items():
        assert {n.removeprefix("objective.") for n in update.state if n.startswith("objective.")} == own[name]
        assert update.state.keys() == made.method.expects(server, name).state.keys()
        assert all(differs(update.state, before, [f"objective.{n}"]) for n in own[name])
    aggregate(made.method, server, list(updates.values()), "train")
    same_bytes(*({n: s[n] for n in ("objective.scale", "objective.shift")} for s in (server.state, updates["a"].state)))
    if spaces == "disjoint":
        assert torch.equal(server.state["objective.image_weight"], updates["c"].state["objective.image_weight"])
        assert torch.equal(server.state["objective.text_weight"], updates["d"].state["objective.text_weight"])
    else:
        mean = (updates["c"].state["objective.weight"] + updates["d"].state["objective.weight"]) / 2
        assert torch.allclose(server.state["objective.weight"], mean)


def test_fediot_keeps_what_no_site_trained() -> None:
    made = world(FedIoT(local_steps=1), data={"a": pairs(0, 8)}, objective=CreamFLTaskConfig(classes=4, dim=4).build)
    server = made.server()
    server.phase, before = "train", clone(server.state)
    update = made.site("a").handle(made.method.broadcast(server, "a"))
    aggregate(made.method, server, [update], "train")
    names = [n for n in before if n.endswith("_weight")]
    assert len(names) == 2
    same_bytes({n: server.state[n] for n in names}, {n: before[n] for n in names})


def test_fediot_gives_the_public_set_to_multimodal_sites() -> None:
    made = world(FedIoT(local_steps=4), data={"a": pairs(0, 8), "c": lone(1, 8, "image")})
    public = made.public.content["train"][0]

    def of_public(site: str) -> list[bool]:
        client, message = made.client(site), Broadcast(0, "train", {})
        batches = made.method.batches(client, message, SGD.batch_size, torch.Generator().manual_seed(0))
        return [bool((batch["image"][0] == public).all(dim=1).any()) for batch in batches]

    assert of_public("a") == [False, True, False, True]
    assert of_public("c") == [False] * 4


# All


@pytest.mark.parametrize("kind", [FedMD, FedET, FedGEMS])
def test_without_distillation_the_sites_have_no_influence(kind: type[PublicEnsemble]) -> None:
    method = replace(kind(**STEPS), kd_weight=0.0)
    other = {name: pairs(50 + index, 9) for index, name in enumerate("abc")}
    same_bytes(world(method).run().state, world(method, data=other).run().state)
    learned = replace(method, kd_weight=0.3)
    assert differs(world(learned).run().state, world(learned, data=other).run().state)
    assert set(three_sites()) == set("abc")
