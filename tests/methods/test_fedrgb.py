"""FedRGB: the teacher's guidance, the min-max aligner, what travels, what stays, and that no kill matters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.toy import ADAMW, DIM, Recorder, Toy, World, clone, differs, same_bytes, three_sites
from torch import nn

from fedvlp.core.aggregation import payload
from fedvlp.core.types import Broadcast, Update, VLOutput, group
from fedvlp.federation.loop import Rounds
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import FedAvg, FedRGB
from fedvlp.methods.fedrgb import aligner, contrast
from fedvlp.objectives.convirt import info_nce
from fedvlp.training.local_training import train

RGB = FedRGB(local_steps=3, aligner_steps=2, dro_batch=4)


class Summed(nn.Module):
    """A task whose gradient is known: the sum of all image components over the batch, divided by its size."""

    def forward(self, output: VLOutput, batch: dict) -> dict:
        assert output.image is not None
        return {"contrastive": output.image.sum(1).mean()}


def identities(module: Toy) -> Toy:
    """Alignment modules and heads that pass on what they get."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if aligner(name):
                parameter.copy_(torch.eye(DIM) if parameter.ndim == 2 else torch.zeros(DIM))
    return module


def world(method: FedRGB | FedAvg = RGB, **options) -> World:
    return World(method, **options)


def linear(method: FedRGB) -> World:
    """Vectors are not normalised, aligners are identities, the task is ``Summed``: everything is linear."""
    return world(method, model=lambda: identities(Toy(unit=False)), objective=Summed)


def shifted(state: dict, **shift: float) -> dict:
    """A copy with constants added; ``image_head=1`` is added to image_head.bias."""
    moved = clone(state)
    for name, value in shift.items():
        moved[f"{name}.bias" if f"{name}.bias" in moved else f"{name}.0.bias"] += value
    return moved


def prepared(one: World, phase: str, received: dict | None = None) -> tuple:
    """A client of site a with the world's weights in evaluation mode, a batch of 4, and the message of ``phase``."""
    client = one.client("a")
    client.set_trainable(lambda name: one.method.trains(name, phase))
    batch = next(client.data.batches("train", 4, drop_last=True))
    return client, batch, Broadcast(0, phase, received or clone(client.state()))


def gradients(client, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = list(client.trainable())
    found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    return {name: g if g is not None else torch.zeros_like(p) for (name, p), g in zip(named, found, strict=True)}


# The local phase


def test_guidance_and_its_gradient_are_zero_where_aligner_and_teacher_agree() -> None:
    client, batch, message = prepared(world(), "local")
    guide = RGB.losses(client, batch, message)["guide"]
    assert guide.item() == 0.0
    assert all((gradient == 0).all() for gradient in gradients(client, guide).values())


def test_guidance_by_hand() -> None:
    """Linear, teacher = aligner + c on the image head's bias (c = 1) and the text head's (c = -2).

    zt - z is c for every sample whatever the encoder gives: L_guide = 4 * 1 + 4 * 4 = 20, times alpha = 0.5 is 10. Its
    gradient on a head's bias is -2 alpha c, and none on the encoders, since they feed the teacher too.
    """
    method = replace(RGB, alpha=0.5)
    one = linear(method)
    client, batch, message = prepared(one, "local", shifted(one.client("a").state(), image_head=1.0, text_head=-2.0))
    guide = method.losses(client, batch, message)["guide"]
    assert guide.item() == pytest.approx(10.0, rel=1e-6)
    found = gradients(client, guide)
    torch.testing.assert_close(found["image_head.bias"], torch.full((DIM,), -1.0))
    torch.testing.assert_close(found["text_head.bias"], torch.full((DIM,), 2.0))
    for name in ("image_encoder.0.weight", "image_encoder.0.bias", "text_encoder.0.weight"):
        torch.testing.assert_close(found[name], torch.zeros_like(found[name]))


def test_alpha_weighs_the_guidance_or_the_task_as_printed() -> None:
    one = world()
    received = shifted(one.client("a").state(), image_head=0.3)
    totals = {}
    for form in ("guidance", "eq2"):
        for alpha in (1.0, 3.0):
            method = replace(RGB, loss_form=form, alpha=alpha)
            client, batch, message = prepared(world(method), "local", received)
            totals[form, alpha] = {n: t.item() for n, t in method.losses(client, batch, message).items()}
    assert totals["guidance", 1.0] == totals["eq2", 1.0]
    task, guide = totals["eq2", 1.0]["contrastive"], totals["eq2", 1.0]["guide"]
    assert guide > 0
    assert totals["guidance", 3.0] == {"contrastive": task, "guide": pytest.approx(3 * guide)}
    assert totals["eq2", 3.0] == {"contrastive": pytest.approx(3 * task), "guide": guide}


def test_contrastive_guidance_compares_teacher_and_aligner_within_a_modality() -> None:
    method = replace(RGB, contrastive_guidance=True, alpha=2.0)
    one = world(method)
    received = shifted(one.client("a").state(), image_head=0.3)
    client, batch, message = prepared(one, "local", received)
    with torch.no_grad():
        own, teacher = client.model(batch), client.anchor(received)(batch)
    expected = sum(
        sum(info_nce(zt, z, 0.07)) for zt, z in ((teacher.image, own.image), (teacher.text, own.text))
    )  # fmt: skip
    torch.testing.assert_close(method.losses(client, batch, message)["guide"], 2.0 * expected)


# The aligner phase


def test_aligner_losses_by_hand() -> None:
    """Linear; f' is f with its image bias moved by c = 1; the site's own aligner scales images by 3; beta = 2.

    zt~ - zt = -c: consistency = 2 * 4 = 8. L_CL = S and L_task = 3 S with S the mean sum of f'(x), as al* is the
    identity. On the bias of f': 2 beta c = 4 from consistency, 1 from L_CL, 3 from L_task: 8. On the teacher's head
    bias: 0 + 1 + 0, for it moves zt~ and zt alike and takes no part in L_task.
    """
    one = linear(RGB)
    state = clone(one.client("a").state())
    client, batch, message = prepared(one, "aligner", state)
    client.memory = {n: t.clone() for n, t in state.items() if aligner(n)}
    client.memory["image_alignment.weight"] *= 3
    with torch.no_grad():
        client.model.image_encoder[0].bias += 1
        total = client.model.encode(batch)[0].sum(1).mean().item()
    terms = RGB.losses(client, batch, message)
    assert {name: term.item() for name, term in terms.items()} == {
        "consistency": pytest.approx(8.0, rel=1e-5),
        "teacher": pytest.approx(total, rel=1e-5),
        "contrastive": pytest.approx(3 * total, rel=1e-5),
    }
    found = gradients(client, torch.stack(list(terms.values())).sum())
    torch.testing.assert_close(found["image_encoder.0.bias"], torch.full((DIM,), 8.0))
    torch.testing.assert_close(found["image_head.bias"], torch.full((DIM,), 1.0))


@dataclass(frozen=True)
class FrozenCopy(FedRGB):
    """f' does not learn: a learning rate of zero on it."""

    def trains(self, name: str, phase: str) -> bool:
        return super().trains(name, phase) and (phase == "local" or aligner(name))


def test_consistency_is_exactly_zero_where_the_copy_does_not_learn() -> None:
    frozen = world(FrozenCopy(local_steps=3, aligner_steps=4, dro_batch=4)).run()
    learning = world(replace(RGB, aligner_steps=4)).run()
    for record in frozen.history:
        if record["phase"] == "aligner":
            assert [m["loss/consistency"] for m in record["sites"].values()] == [0.0, 0.0, 0.0]
    assert all(m["loss/consistency"] > 0 for m in learning.history[-1]["sites"].values())


def test_a_site_without_an_aligner_of_its_own_takes_the_teacher() -> None:
    client, batch, message = prepared(world(), "aligner")
    assert client.memory == {}
    terms = RGB.losses(client, batch, message)
    torch.testing.assert_close(terms["contrastive"], terms["teacher"])  # al_i = al*


def test_the_frozen_aligner_is_not_changed_by_the_phase_that_reads_it() -> None:
    one = world(model=lambda: Toy(norm=True))
    client, _, message = prepared(one, "aligner")
    client.memory = {n: t + 0.1 for n, t in message.state.items() if aligner(n)}
    before, received = clone(client.memory), clone(message.state)
    train(RGB, client, message, ADAMW, lambda: False)
    same_bytes(before, client.memory)
    same_bytes(received, message.state)
    assert differs(received, client.state(), [n for n in received if aligner(n) and n.endswith("weight")])


# What travels, what stays


def test_encoders_travel_after_local_and_the_teacher_after_aligner() -> None:
    names = world().client("a").state()
    local = {name for name in names if RGB.shares(name, "local")}
    assert {group(name) for name in local} == {"encoder"}
    assert {name for name in names if RGB.shares(name, "aligner")} == names.keys() - local
    average = replace(RGB, avg_aligner=True)
    assert all(average.shares(name, "local") for name in names)
    assert RGB.shares("objective.prototypes", "local")
    assert not RGB.trains("objective.prototypes", "aligner")


def test_bytes_of_a_phase_are_the_parameters_that_travel() -> None:
    one = world()
    sizes = {n: 4 * p.numel() for n, p in one.modules()[0].named_parameters()}
    aligners = sum(size for name, size in sizes.items() if aligner(name))
    for record in one.run().history:
        expected = aligners if record["phase"] == "aligner" else sum(sizes.values()) - aligners
        assert record["bytes"] == {"bytes_down": 3 * sum(sizes.values()), "bytes_up": 3 * expected}


def test_the_sites_aligner_stays_between_the_phases_of_a_round() -> None:
    """After ``local`` the site keeps the aligner it trained, and the server has none of it."""
    one = world(replace(RGB, local_steps=1))
    site = one.site("a")
    start = clone(one.server().state)
    update = site.handle(Broadcast(0, "local", start))
    assert {group(name) for name in update.state} == {"encoder"}
    assert payload(update) == sum(4 * t.numel() for name, t in start.items() if group(name) == "encoder")
    kept = clone(site.memory.newest())
    assert kept.keys() == {name for name in start if aligner(name)}
    trained = one.client("a")
    trained.load(start)
    torch.manual_seed(0)
    train(one.method, trained, Broadcast(0, "local", start), one.training, lambda: False)
    same_bytes(kept, {name: t for name, t in clone(trained.state()).items() if aligner(name)})
    assert differs(kept, start, list(kept))
    site.handle(Broadcast(0, "aligner", start))
    same_bytes(site.memory.newest(), kept)  # the teacher that this phase trained has not taken its place


def test_the_server_averages_encoders_then_teachers() -> None:
    """One round, replies written here: encoders +1 and +3 -> +2; aligners +2 and +6 -> +4; the rest keeps its value."""
    one = World(replace(RGB, rho=0.0), data={"a": three_sites()["a"], "b": three_sites()["b"]})
    start = clone(one.server().state)

    def exchange(messages):
        for index, (site, message) in enumerate(messages.items()):
            step = (1 if message.phase == "local" else 2) * (2 * index + 1)
            state = {n: t + step for n, t in message.state.items() if one.method.shares(n, message.phase)}
            yield site, Update(site, message.round, message.phase, 8 + 100 * index, state)

    one.rounds = Rounds(rounds=1, evaluate_every=0)
    server = one.run(exchange)
    for name, tensor in start.items():
        torch.testing.assert_close(server.state[name], tensor + (4 if aligner(name) else 2))


# The weights


def test_weights_move_after_local_and_act_on_aligner_alone() -> None:
    seen: list[tuple[str, dict]] = []

    def noting(messages):
        for site, message in messages.items():
            seen.append((message.phase, message.lr_scale))
            yield site, one.site(site).handle(message)

    one = world(replace(RGB, gamma=2.0), folder=None)
    one.data = {"a": three_sites()["a"], "b": three_sites()["b"], "c": three_sites()["c"]}
    history = one.run(noting).history
    local = [scale for phase, scale in seen if phase == "local"]
    assert all(scale == 1.0 for scale in local)
    uniform, moved = history[0]["memory"]["dro_weights"], history[2]["memory"]["dro_weights"]
    assert uniform == pytest.approx([1 / 3] * 3)
    assert max(moved) - min(moved) > 1e-3
    last = [scale for phase, scale in seen if phase == "aligner"][-3:]
    assert last == pytest.approx([3 * w for w in moved])  # those that this round's local phase gave
    assert history[3]["memory"]["dro_weights"] == moved


@pytest.mark.parametrize("action", ["lr", "loss"])
def test_local_is_not_scaled_even_after_the_weights_have_moved(action: str) -> None:
    """w first moves in round 1, after its local phase: local of round 2 is the first on which it could act."""
    one = world(replace(RGB, gamma=2.0, dro_apply=action), rounds=Rounds(rounds=3, evaluate_every=0))
    spy = Recorder(one)
    history = one.run(spy).history
    seen = {(message.round, message.phase, site): getattr(message, f"{action}_scale") for site, message in spy.sent}
    weights = {(record["round"], record["phase"]): record["memory"]["dro_weights"] for record in history}
    assert max(weights[1, "aligner"]) - min(weights[1, "aligner"]) > 1e-3, "w is not uniform when round 2 begins"
    assert [seen[2, "local", site] for site in "abc"] == [1.0, 1.0, 1.0]
    assert [seen[2, "aligner", site] for site in "abc"] == pytest.approx([3 * w for w in weights[2, "local"]])


@pytest.mark.parametrize(("phase", "expected"), [("local", [1.0, 1.0, 1.0]), ("aligner", [1.5, 0.9, 0.6])])
def test_weights_in_the_mean_act_on_the_aligner_alone(phase: str, expected: list[float]) -> None:
    """With w = (0.5, 0.3, 0.2) and dro_apply = aggregate a site counts 3 w_i among the teachers, 1 among encoders."""
    method = replace(RGB, dro_apply="aggregate")
    server = world(method).server()
    method.start(server)
    server.memory["dro_weights"] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    server.phase = phase
    assert [method.weight(server, Update(site, 2, phase, 8)) for site in "abc"] == pytest.approx(expected)


def test_hardness_is_the_aligner_phases_loss_of_the_received_model() -> None:
    """al = al* and f' = f at the start of a round: consistency 0, and L_CL = L_task = the contrastive loss."""
    one = world(replace(RGB, dro_batch=8))
    client, _, message = prepared(one, "local")
    with torch.no_grad():
        found = one.method.probe(client, message)["loss"]
        output = client.model(next(client.data.batches("train", 8, drop_last=True)))
    assert found == pytest.approx(2 * sum(info_nce(output.image, output.text, 0.07)).item(), rel=1e-5)


def test_hardness_counts_every_term_of_the_task() -> None:
    """L_CL = 1 and L_task = 1 + 2 + 4."""
    terms = {"contrastive": torch.tensor(1.0), "local": torch.tensor(2.0), "prototype": torch.tensor(4.0)}
    assert RGB.hardness(terms).item() == 8.0


def test_without_alpha_no_guidance_is_computed() -> None:
    method = replace(RGB, alpha=0.0)
    assert method.losses(*prepared(world(method), "local")).keys() == {"contrastive"}


def test_an_absent_modality_adds_nothing_to_a_contrast() -> None:
    client, batch, _ = prepared(world(), "local")
    output = client.model(batch)
    assert contrast(client, batch, (output.image, None), (None, output.text)).item() == 0.0
    whole = contrast(client, batch, (output.image, output.text))
    assert torch.equal(contrast(client, batch, (output.image, output.text), (output.image, None)), whole)


def test_one_site_has_weight_one() -> None:
    one = world(data={"a": three_sites()["a"]})
    for record in one.run().history:
        assert record["memory"]["dro_weights"] == [1.0]


# Reductions and ablations


@pytest.mark.parametrize("training", [None, ADAMW])
def test_no_guidance_no_radius_no_aligner_phase_is_fedavg(training) -> None:
    options = {"training": training} if training else {}
    options["model"] = lambda: Toy(norm=True, dropout=0.2)
    reduced = FedRGB(alpha=0.0, rho=0.0, avg_aligner=True, local_steps=3, dro_batch=4)
    same_bytes(
        world(reduced, **options).run().state,
        world(FedAvg(weighting="uniform", local_steps=3), **options).run().state,
    )


def test_avg_aligner_guides_by_the_mean_of_the_sites_aligners() -> None:
    method = replace(RGB, avg_aligner=True, rho=0.0)
    assert method.phases(0) == ("local",)
    one = world(method)
    updates: dict[tuple[int, str], dict] = {}
    teachers: dict[int, dict] = {}

    def noting(messages):
        for site, message in messages.items():
            teachers[message.round] = clone(message.state)
            update = one.site(site).handle(message)
            updates[message.round, site] = clone(update.state)
            yield site, replace(update, state=updates[message.round, site])

    history = one.run(noting).history
    for name in teachers[1]:
        mean = torch.stack([updates[0, site][name].double() for site in "abc"]).mean(0)
        torch.testing.assert_close(teachers[1][name].double(), mean, rtol=1e-6, atol=1e-7)
    assert all(metrics["loss/guide"] > 0 for metrics in history[1]["sites"].values())


def test_the_least_that_makes_sense_is_taken() -> None:
    replace(RGB, aligner_steps=1, local_steps=1, alpha=0.0, beta=0.0, gamma=0.0)
    replace(RGB, aligner_steps=0, avg_aligner=True)


# The same bytes however it runs


def test_a_repeated_aligner_task_starts_from_the_same_aligner(tmp_path: Path) -> None:
    """The reply was lost and the task comes again, in another process: the same memory, the same bytes."""
    one = world(folder=tmp_path)
    start = clone(one.server().state)
    site = one.site("a")
    site.handle(Broadcast(0, "local", start))
    first = clone(site.handle(Broadcast(0, "aligner", start)).state)
    again = world(folder=tmp_path).site("a")
    same_bytes(first, clone(again.handle(Broadcast(0, "aligner", start)).state))
    assert isinstance(again.memory, SiteMemory)
