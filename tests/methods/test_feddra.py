"""FedDRA: the checks B1-B6 of the specification, what travels in each phase, and what an anchor is."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.toy import ADAMW, SGD, Toy, World, clone, pairs, same_bytes
from torch import Tensor

from fedvlp.core.client import BatchNorm, Client
from fedvlp.core.seeds import seed
from fedvlp.core.types import Batch, Broadcast, Reply, VLOutput, group
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, FedDRA
from fedvlp.methods.guidance import guidance
from fedvlp.methods.robust import WEIGHTS
from fedvlp.objectives.convirt import info_nce
from fedvlp.training.settings import Training

DRA = FedDRA(local_steps=2, align_steps=3, mu=5.0, dro_batch=4)
THREE = Rounds(rounds=3, evaluate_every=0, clip_to_median=0)
ENCODERS = [name for name in Toy(norm=True).state_dict() if group(name) == "encoder"]


@pytest.mark.parametrize("training", [SGD, ADAMW])
@pytest.mark.parametrize("apply", ["lr", "loss", "aggregate"])
def test_b1_without_its_parts_it_is_fedavg_bit_for_bit(training: Training, apply: str) -> None:
    bare = FedDRA(local_steps=3, align_steps=0, mu=0.0, rho=0.0, dro_apply=apply, dro_batch=4)
    plain = FedAvg(local_steps=3, weighting="uniform")
    seen, expected = (
        World(method, training=training, rounds=THREE, model=lambda: Toy(norm=True, dropout=0.2)).run()
        for method in (bare, plain)
    )
    same_bytes(seen.state, expected.state)


def test_b2_without_the_joint_phase_encoders_keep_their_bits() -> None:
    world = World(replace(DRA, local_steps=0), rounds=THREE, model=lambda: Toy(norm=True, dropout=0.2))
    start, end = world.server().state, world.run().state
    for name in start:
        assert torch.equal(start[name], end[name]) == (name in ENCODERS), name


def step(method: FedDRA, phase: str, *, shift: float = 0.0, **model: Any) -> tuple[Client, Batch, Broadcast, Any]:
    """A client ready for the first step of a phase, its batch, the message, and the loss terms of that step."""
    world = World(method, model=lambda: Toy(**model))
    client = world.client("a")
    message = Broadcast(0, phase, clone(client.state()))
    client.set_trainable(lambda name: method.trains(name, phase))
    with torch.no_grad():
        for name, parameter in client.trainable():
            parameter += shift if "head" in name else 0
    batch = next(client.data.batches("train", 4, drop_last=True))
    return client, batch, message, method.losses(client, batch, message)


@pytest.mark.parametrize("phase", ["align", "joint"])
def test_b3_where_the_anchor_is_the_model_the_constraint_and_its_gradient_are_0(phase: str) -> None:
    client, _, _, terms = step(DRA, phase)
    assert terms["constraint"].item() == 0.0
    terms["constraint"].backward()
    gradients = [parameter.grad for _, parameter in client.trainable()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_b3_after_one_step_it_is_not() -> None:
    _, _, _, terms = step(DRA, "joint", shift=0.1)
    assert terms["constraint"].item() > 0


@pytest.mark.parametrize("phase", ["align", "joint"])
@pytest.mark.parametrize("mu", [1.0, 5.0])
def test_b4_through_the_method(phase: str, mu: float) -> None:
    """The head's bias is added to z: its gradient is sum_b 2 mu (z_b - z*_b)/B."""
    method = replace(DRA, mu=mu)
    client, batch, message, terms = step(method, phase, shift=0.1, unit=False)
    terms["constraint"].backward()
    with torch.no_grad():
        z = client.model(batch).image
        client.load(message.state)
        anchor = client.model(batch).image
    by_hand = (2 * mu * (z - anchor) / 4).sum(0)
    assert torch.allclose(client.model.image_head.bias.grad, by_hand, atol=1e-5)


def test_the_constraint_by_hand() -> None:
    """||(1,0)-(0,1)||^2 = 2 and ||(1,0)-(1,0)||^2 = 0 on images, (0-2)^2 = 4 twice on texts: (2+0)/2 + (4+4)/2 = 5."""
    one = VLOutput(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    other = VLOutput(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[2.0, 1.0], [2.0, 1.0]]))
    assert guidance(one, other).item() == 5.0
    assert guidance(one, other, "mean_dim").item() == 2.5  # divided by d = 2
    assert guidance(VLOutput(one.image), other).item() == 1.0
    assert guidance(VLOutput(None, one.text), other).item() == 4.0


def centralized_two_stage(data: Any, training: Training, rounds: int, mu: float) -> dict[str, Tensor]:
    """FedDRA with one site, written out: no server, no weights, an anchor frozen at the start of each stage."""
    model = Toy()
    for round in range(rounds):
        for index, (stage, steps) in enumerate((("align", 3), ("joint", 2))):
            anchor = copy.deepcopy(model).eval()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(stage == "joint" or "encoder" not in name)
            parameters = [p for p in model.parameters() if p.requires_grad]
            if training.optimizer == "sgd":
                optimizer: Any = torch.optim.SGD(parameters, lr=training.lr)
            else:
                optimizer = torch.optim.AdamW(parameters, lr=training.lr, weight_decay=training.weight_decay)
            generator = torch.Generator().manual_seed(seed(0, "a", round, index, "batches"))
            for batch in data.train_batches(steps, training.batch_size, generator):
                out = model(batch)
                with torch.no_grad():
                    target = anchor(batch)
                i2t, t2i = info_nce(out.image, out.text, 0.07)
                distance = ((out.image - target.image) ** 2).sum(1) + ((out.text - target.text) ** 2).sum(1)
                optimizer.zero_grad()
                (i2t + t2i + mu * distance.mean()).backward()
                optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("training", [SGD, ADAMW])
def test_b5_one_site_is_the_centralized_two_stage_loop(training: Training) -> None:
    data = pairs(3, 24)
    seen = World(replace(DRA, gamma=9.0, rho=1.0), {"a": data}, training, THREE).run()
    by_hand = centralized_two_stage(data, training, rounds=3, mu=5.0)
    assert seen.memory[WEIGHTS].tolist() == [1.0]
    for name, tensor in by_hand.items():
        assert torch.allclose(seen.state[name], tensor, rtol=1e-4, atol=1e-5), name
    start = Toy().state_dict()
    assert all((seen.state[name] - start[name]).abs().max() > 1e-3 for name in by_hand)


@pytest.mark.parametrize("apply", ["lr", "loss"])
@pytest.mark.parametrize("training", [SGD, ADAMW])
def test_b6_what_the_weight_does_to_the_first_step(training: Training, apply: str) -> None:
    """m = 2: ``lr`` doubles the step under both optimisers, ``loss`` under SGD alone (spec 15 B6)."""
    method = FedDRA(local_steps=1, align_steps=0, dro_apply=apply, dro_batch=4)
    world = World(method, training=training)
    start = world.server().state

    def moved(scale: float) -> dict[str, Tensor]:
        message = Broadcast(0, "joint", start, **{f"{apply}_scale": scale})
        return {n: t - start[n] for n, t in clone(world.site("a").handle(message).state).items()}

    once, twice = moved(1.0), moved(2.0)
    factor = 1.0 if (apply, training.optimizer) == ("loss", "adamw") else 2.0
    for name in once:
        assert torch.allclose(twice[name], factor * once[name], rtol=1e-2, atol=2e-6), name


class Watch:
    """An exchange that keeps what is sent and what comes back."""

    def __init__(self, world: World) -> None:
        self.inner = SequentialExchange(world.site)
        self.sent: dict[tuple[int, str, str], Broadcast] = {}
        self.replies: dict[tuple[int, str, str], Any] = {}

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for site, reply in self.inner(messages):
            message = messages[site]
            key = (message.round, message.phase, site)
            self.sent[key] = replace(message, state=clone(message.state))
            self.replies[key] = replace(reply, state=clone(reply.state))  # type: ignore[type-var]
            yield site, reply


@pytest.fixture(scope="module")
def watched() -> Watch:
    world = World(replace(DRA, rho=0.5, gamma=5.0), rounds=THREE, model=lambda: Toy(norm=True, dropout=0.2))
    watch = Watch(world)
    world.run(watch)
    return watch


def test_two_phases_in_every_round(watched: Watch) -> None:
    assert [key[:2] for key in watched.sent if key[2] == "a"] == [
        (0, "align"), (0, "joint"), (1, "align"), (1, "joint"), (2, "align"), (2, "joint"),
    ]  # fmt: skip


def test_align_uploads_alignment_and_heads_alone(watched: Watch) -> None:
    for (_, phase, _), reply in watched.replies.items():
        expected = {"alignment", "head"} | ({"encoder"} if phase == "joint" else set())
        assert {group(name) for name in reply.state} == expected
        assert reply.state.keys() == {n for n in Toy(norm=True).state_dict() if group(n) in expected}


def test_the_joint_phase_starts_from_the_averaged_alignment_and_the_rounds_encoders(watched: Watch) -> None:
    """Resolution of spec 4.5; the released code let sites keep their own stage-1 aligners."""
    for round in range(3):
        start = watched.sent[round, "align", "a"].state
        for site in "abc":
            state = watched.sent[round, "joint", site].state
            for name in start:
                if name in ENCODERS:
                    assert torch.equal(state[name], start[name]), name
                else:
                    uploads = [watched.replies[round, "align", s].state[name].double() for s in "abc"]
                    assert torch.allclose(state[name].double(), sum(uploads) / 3, rtol=0, atol=1e-7), name
                    assert not torch.equal(state[name], start[name])


def test_the_loss_travels_with_the_first_phase_alone(watched: Watch) -> None:
    assert {("loss" in reply.scalars, key[1]) for key, reply in watched.replies.items()} == {
        (True, "align"), (False, "joint"),
    }  # fmt: skip


def test_the_weights_move_after_the_first_phase_and_act_from_the_next(watched: Watch) -> None:
    scales = {key[:2]: [] for key in watched.sent}
    for key, message in watched.sent.items():
        scales[key[:2]].append(message.lr_scale)
    assert scales[0, "align"] == scales[0, "joint"] == scales[1, "align"] == [1.0] * 3
    assert scales[1, "joint"] == scales[2, "align"] != [1.0] * 3
    assert scales[2, "joint"] != scales[2, "align"]
    assert all(sum(s) == pytest.approx(3.0) for s in scales.values())


def test_the_anchor_of_each_phase_is_what_the_phase_started_from() -> None:
    """In the joint phase: old encoders, new alignment; without gradient or dropout, whatever the client trains."""
    seen: list[tuple[int, str]] = []

    @dataclass(frozen=True)
    class Looks(FedDRA):
        def after_step(self, client: Client, message: Broadcast) -> None:
            anchor = client.anchor(message.state)
            same_bytes(dict(anchor.state_dict()), dict(message.state))
            assert not any(module.training for module in anchor.modules() if not isinstance(module, BatchNorm))
            assert not any(p.requires_grad for p in anchor.parameters())
            seen.append((message.round, message.phase))

    method = Looks(local_steps=2, align_steps=1, dro_batch=4)
    world = World(method, {"a": pairs(0)}, rounds=THREE, model=lambda: Toy(norm=True))
    world.run()
    assert seen == [(round, phase) for round in range(3) for phase in ("align", "joint", "joint")]


def test_the_anchor_is_not_trained() -> None:
    """Its tensors are the received state itself: a gradient or an update there would corrupt every site's start."""
    client, batch, message, _ = step(DRA, "joint", shift=0.1)
    before = clone(message.state)
    optimizer = torch.optim.SGD([p for _, p in client.trainable()], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        sum(DRA.losses(client, batch, message).values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    same_bytes(message.state, before)
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in message.state.values())


def test_frozen_encoders_run_in_eval_mode_in_the_align_phase() -> None:
    client, batch, _, _ = step(DRA, "align", norm=True, dropout=0.5)
    assert not client.model.image_encoder.training
    assert client.model.image_alignment.training
    one, other = client.model.encode(batch), client.model.encode(batch)
    assert torch.equal(one[0], other[0])
    assert not one[0].requires_grad


def test_mu_0_builds_no_anchor() -> None:
    client, _, _, terms = step(replace(DRA, mu=0.0), "joint")
    assert set(terms) == {"contrastive"}
    assert client._anchor is None


@pytest.mark.parametrize(("every", "rounds"), [(1, "0123"), (2, "02"), (3, "03")])
def test_align_every(every: int, rounds: str) -> None:
    method = replace(DRA, align_every=every)
    assert "".join(str(r) for r in range(4) if "align" in method.phases(r)) == rounds
    assert all(method.phases(r)[-1] == "joint" for r in range(4))
    world = World(method, rounds=Rounds(rounds=4, evaluate_every=0))
    history = world.run().history
    assert sum(record["phase"] == "align" for record in history) == len(rounds)
    assert all("probe/loss" in m for r in history[::1] for m in r["sites"].values() if r["phase"] == "align")


def test_one_joint_step_makes_a_joint_phase() -> None:
    assert FedDRA(local_steps=1, align_every=2).phases(1) == ("joint",)
