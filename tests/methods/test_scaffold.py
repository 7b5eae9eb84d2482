"""SCAFFOLD: two rounds by hand, what it is equal to, and a control variate that stays the mean of the sites'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scalar import NAME, scalars, targets, weight
from support.toy import (
    ADAMW,
    SGD,
    Fuse,
    Recorder,
    Toy,
    Wired,
    World,
    clone,
    differs,
    forked,
    pairs,
    same_bytes,
    three_sites,
)  # fmt: skip

from fedvlp.core.norm_statistics import split
from fedvlp.core.server_state import Server
from fedvlp.core.types import CHANGE, Broadcast, Failure, FailureKind, State, group, without_prefix
from fedvlp.federation.codec import Wire
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Rounds
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods import SCAFFOLD, FedAvg
from fedvlp.methods.scaffold import CONTROL, COUNTED, NEXT, NEXT_ROUND, OWN, SHARE, SUM
from fedvlp.run.config import override
from fedvlp.run.presets import get

AVERAGE = FedAvg(local_steps=2, weighting="uniform")


def two_sites() -> dict[str, Any]:
    return {"a": targets(4, 1.0), "b": targets(8, 3.0)}


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    """K = 2, eta = 0.1, g = y - t with t = 1 at a and 3 at b, x = 0.

    Round 0, no correction. a: g = -1, y = 0.1; g = -0.9, y = 0.19; c_a = -0.95. b: g = -3, y = 0.3; g = -2.7, y = 0.57;
    c_b = -2.85. So x = (0.19 + 0.57) / 2 = 0.38 and c = (-0.95 - 2.85) / 2 = -1.9.
    Round 1. a corrects by c - c_a = -0.95: g = -0.62, y = 0.38 + 0.157 = 0.537; g = -0.463, y = 0.537 + 0.1413 =
    0.6783; c_a = -0.5415. b by c - c_b = 0.95: g = -2.62, y = 0.547; g = -2.453, y = 0.6973; c_b = -2.5365.
    So x = 0.6878 and c = -1.539. FedAvg's sites would have ended at 0.4978 and 0.8778, its mean at the same 0.6878.
    """
    world = scalars(SCAFFOLD(local_steps=2), two_sites(), rounds=2, folder=tmp_path)
    spy = Recorder(world)
    server = world.run(spy)
    sent = [(reply.round, site, weight(reply.state), weight(reply.state, CHANGE + NAME)) for site, reply in spy.replies]
    assert sent == [
        (0, "a", pytest.approx(0.19), pytest.approx(-0.95)),
        (0, "b", pytest.approx(0.57), pytest.approx(-2.85)),
        (1, "a", pytest.approx(0.6783), pytest.approx(-0.5415 + 0.95)),
        (1, "b", pytest.approx(0.6973), pytest.approx(-2.5365 + 2.85)),
    ]
    assert [weight(message.aux) for _, message in spy.sent] == pytest.approx([0, 0, -1.9, -1.9])
    assert weight(server.state) == pytest.approx(0.6878)
    assert weight(server.memory, CONTROL + NAME) == pytest.approx(-1.539)
    kept = {site: SiteMemory(tmp_path / "sites" / site).newest() for site in "ab"}
    assert {site: weight(memory, NEXT + NAME) for site, memory in kept.items()} == pytest.approx(
        {"a": -0.5415, "b": -2.5365}
    )


def test_sites_that_drift_apart_are_brought_to_one_point() -> None:
    """a's loss is four times as steep. FedAvg's fixed point is not the minimum of the mean; SCAFFOLD's is.

    The mean of 4 (w - 1)^2 / 2 and (w - 3)^2 / 2 is least at (4 + 3) / 5 = 1.4. Three local steps of 0.1 at rates of 4
    and 1 shrink the distance to t by q_a = 0.6^3 = 0.216 and q_b = 0.9^3 = 0.729, so FedAvg rests where
    0.784 (w - 1) = 0.271 (3 - w), at 1.5137.
    """
    data = {"a": targets(4, 1.0), "b": targets(4, 3.0)}

    class Steep(World):
        def site(self, name: str) -> Any:
            site = super().site(name)
            handle, rate = site.handle, 4.0 if name == "a" else 1.0
            site.handle = lambda message, *rest: handle(replace(message, loss_scale=rate), *rest)  # type: ignore
            return site

    def rests(method: Any) -> float:
        world = scalars(method, data)
        rounds = Rounds(rounds=10, evaluate_every=0, clip_to_median=0)
        return weight(Steep(**{**vars(world), "rounds": rounds}).run().state)

    assert rests(FedAvg(local_steps=3, weighting="uniform")) == pytest.approx(1.5137, abs=2e-3)
    assert rests(SCAFFOLD(local_steps=3)) == pytest.approx(1.4, abs=2e-3)


def test_the_change_is_option_ii_under_plain_sgd() -> None:
    """c_i+ - c_i = -c + (x - y_i) / (K eta), in the second round of a model with dropout and batch norm.

    To some eight roundings of float32 (1.2e-7 each): three steps, two differences, a division.
    """
    world = World(SCAFFOLD(local_steps=3), training=replace(SGD, lr=1.0), model=lambda: Toy(norm=True, dropout=0.2))
    spy = Recorder(world)
    world.run(spy)
    messages = {(m.round, site): m for site, m in spy.sent}
    moved = False
    for site, reply in spy.replies:
        message = messages[reply.round, site]
        for name, control in message.aux.items():
            by_paper = -control + (message.state[name] - reply.state[name]) / 3
            torch.testing.assert_close(reply.state[CHANGE + name], by_paper, rtol=1e-6, atol=1e-6)
            moved |= bool(control.any())
    assert moved, "the second round has a control variate"


def test_the_first_round_and_a_single_site_are_fedavg_bit_for_bit() -> None:
    """There c = c_i; with several sites the second round is another."""

    def ended(method: FedAvg | SCAFFOLD, data: Mapping[str, Any], rounds: int) -> State:
        settings = {"training": ADAMW, "model": lambda: Toy(norm=True, dropout=0.2)}
        return World(method, data, rounds=Rounds(rounds=rounds, evaluate_every=0), **settings).run().state  # type: ignore

    for data, rounds in ((three_sites(), 1), ({"a": pairs(1)}, 3)):
        same_bytes(ended(SCAFFOLD(local_steps=2), data, rounds), ended(AVERAGE, data, rounds))
    assert differs(ended(SCAFFOLD(local_steps=2), three_sites(), 2), ended(AVERAGE, three_sites(), 2))


class Losing(SequentialExchange):
    """Sites do their tasks; what ``site`` answers in ``round`` is lost on its way."""

    def __init__(self, world: World, site: str, round: int) -> None:
        super().__init__(world.site)
        self.lost = site, round

    def __call__(self, messages: Mapping[str, Broadcast]) -> Any:
        for site, reply in super().__call__(messages):
            gone = (site, messages[site].round) == self.lost
            yield site, (Failure(FailureKind.LOST, "lost") if gone else reply)


def controls(server: Server, folder: Path) -> list[State]:
    """The c_i of every site that the server counts."""
    found = []
    for index, site in enumerate(server.sites):
        memory, _ = split(SiteMemory(folder / "sites" / site).newest())
        arrived = float(memory[NEXT_ROUND]) == float(server.memory[COUNTED][index])
        share = float(server.memory[SHARE][index]) if arrived else 0.0
        before, after = without_prefix(memory, OWN), without_prefix(memory, NEXT)
        found.append({name: (1 - share) * before[name] + share * after[name] for name in before})
    return found


def assert_mean(server: Server, folder: Path) -> None:
    """Asserts that c is the mean of all c_i."""
    sites = controls(server, folder)
    for name, control in ((n.removeprefix(CONTROL), t) for n, t in server.memory.items() if n.startswith(CONTROL)):
        mean = torch.stack([site[name] for site in sites]).mean(0)
        torch.testing.assert_close(control, mean, rtol=1e-5, atol=1e-6)
    assert any(t.any() for n, t in server.memory.items() if n.startswith(CONTROL))


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_lost_reply_is_taken_back_at_its_site(rounds: int, tmp_path: Path) -> None:
    """b trained in round 1, which nobody counted: it goes on from its c_i of round 0, so c stays the mean of all."""
    world = World(SCAFFOLD(local_steps=2), rounds=Rounds(rounds=rounds, evaluate_every=0), folder=tmp_path)
    server = world.run(Losing(world, "b", 1))
    assert server.memory[COUNTED].tolist() == ([1, 0, 1] if rounds == 2 else [2, 2, 2])
    assert_mean(server, tmp_path)


def test_what_the_server_shortened_is_taken_back_at_its_site(tmp_path: Path) -> None:
    """c's targets are far off. Its change is -0.95 t = -285; the median is b's, -1.9, of which five count."""
    data = {"a": targets(4, 1.0), "b": targets(4, 2.0), "c": targets(4, 300.0)}
    server = scalars(SCAFFOLD(local_steps=2), data, folder=tmp_path).run()
    assert weight(server.memory, CONTROL + NAME) == pytest.approx(-(0.95 + 1.9 + 5 * 1.9) / 3)
    assert server.memory[SHARE].tolist() == pytest.approx([1, 1, 5 * 1.9 / 285])
    assert_mean(server, tmp_path)
    again = scalars(SCAFFOLD(local_steps=2), data, rounds=2, folder=tmp_path).run()
    assert_mean(again, tmp_path)


def test_the_wire_s_codecs_leave_the_control_variates_as_they_are(tmp_path: Path) -> None:
    """They code what a site was sent; changes are complete, and c is the mean of the c_i that sites keep."""
    wire = Wire(down="bfloat16", up="int8")
    server = Wired(SCAFFOLD(local_steps=2), folder=tmp_path, wire=wire, rounds=Rounds(rounds=3, evaluate_every=0)).run()
    assert_mean(server, tmp_path)


def test_with_a_site_s_own_normalisation_its_weights_have_no_control_variate(tmp_path: Path) -> None:
    world = World(
        SCAFFOLD(local_steps=2), model=lambda: Toy(norm=True), norm_statistics="site", folder=tmp_path, training=ADAMW
    )
    server = world.run()
    assert any(name.startswith("image_encoder.1") for name in world.site_only())
    assert not any("encoder.1" in name for name in server.memory)
    assert_mean(server, tmp_path)


@dataclass(frozen=True)
class HeadsOnly(SCAFFOLD):
    def shares(self, name: str, phase: str) -> bool:
        return group(name) == "head"


def test_only_what_is_shared_is_controlled(tmp_path: Path) -> None:
    """Encoders train at their site, without a correction, and nothing of them leaves."""
    world = World(HeadsOnly(local_steps=2), folder=tmp_path)
    spy = Recorder(world)
    server = world.run(spy)
    for _, message in spy.sent:
        assert {group(name) for name in message.aux} == {"head"}
    for _, reply in spy.replies:
        assert {group(name.removeprefix(CHANGE)) for name in reply.state} == {"head"}
    assert_mean(server, tmp_path)


def test_a_tower_without_records_is_left_alone() -> None:
    """No loss at an image-only site reaches the text tower: the mean c of the others does not move it there."""
    data = three_sites()
    data["b"].modalities = ("image",)

    class Norms(torch.nn.Module):
        def forward(self, output: Any, batch: Any) -> dict[str, torch.Tensor]:
            there = {"image": output.image, "text": output.text}
            return {name: vector[:, 0].mean() for name, vector in there.items() if vector is not None}

    world = World(SCAFFOLD(local_steps=2), data, training=ADAMW, objective=Norms)
    spy = Recorder(world)
    world.run(spy)
    messages = {(m.round, site): m for site, m in spy.sent}
    for site, reply in spy.replies:
        message = messages[reply.round, site]
        text = [name for name in message.aux if name.startswith("text_")]
        assert differs(reply.state, message.state, text) == (site != "b")
        assert all(reply.state[CHANGE + name].any() for name in text if site != "b" and "bias" not in name)
        assert not any(reply.state[CHANGE + name].any() for name in text if site == "b")


def test_a_site_without_records_keeps_its_control_variate(tmp_path: Path) -> None:
    """It takes no step, so there is no mean of gradients; neither x nor c counts it."""
    data = {**two_sites(), "c": targets(0, 9.0)}
    data["c"].train_batches = lambda steps, size, generator: iter(())  # type: ignore[method-assign]
    alone, together = (
        scalars(SCAFFOLD(local_steps=2), which, folder=tmp_path / name).run()
        for name, which in (("alone", two_sites()), ("together", data))
    )
    assert weight(together.state) == weight(alone.state)
    assert weight(together.memory, CONTROL + NAME) == pytest.approx(weight(alone.memory, CONTROL + NAME) * 2 / 3)
    assert together.memory[COUNTED].tolist() == [0, 0, -1]


def test_killed_within_a_phase_it_ends_with_the_same_change(tmp_path: Path) -> None:
    """The sum of the gradients is in the phase's checkpoint: steps 0 to 3 come from there, 4 and 5 are taken anew."""
    training = replace(ADAMW, checkpoint_steps=2)

    def world(name: str, at: int = 0) -> World:
        data = three_sites()
        data["a"].tick = Fuse(at)
        return World(SCAFFOLD(local_steps=6), data, training, model=lambda: Toy(dropout=0.2), folder=tmp_path / name)

    state = world("plain").server().state
    aux = {name: torch.full_like(t, 0.01) for name, t in state.items()}
    message = Broadcast(0, "train", state, aux=aux, scalars={"counted_round": -1.0, "kept": 1.0})
    expected = clone(world("plain").site("a").handle(message).state)
    assert forked(lambda: world("killed", at=5).site("a").handle(message)) == -9
    assert (tmp_path / "killed" / "sites" / "a" / "unfinished.safetensors").exists()
    same_bytes(clone(world("killed").site("a").handle(message).state), expected)


def test_an_evaluation_is_sent_no_control_variate_and_leaves_the_memory(tmp_path: Path) -> None:
    world = World(SCAFFOLD(local_steps=2), rounds=Rounds(rounds=2), folder=tmp_path, evaluate=lambda c, s: {"x": 1.0})
    spy = Recorder(world)
    server = world.run(spy)
    assert [bool(message.aux) for site, message in spy.sent if site == "a"] == [True, True, False]
    assert_mean(server, tmp_path)
    memory = SiteMemory(tmp_path / "sites" / "a").newest()
    assert float(memory[NEXT_ROUND]) == 1
    assert not any(name.startswith(SUM) for name in memory)


@pytest.mark.parametrize("averaging", ["trimmed", "median"])
def test_another_average_than_the_mean_is_refused(averaging: str) -> None:
    """c would no longer be the mean of the sites' c_i, and never come back to it."""
    with pytest.raises(ValueError, match=f"rounds.averaging is {averaging}: SCAFFOLD's c must be the mean of all c_i"):
        override(get("scaffold"), "rounds.averaging", averaging)
