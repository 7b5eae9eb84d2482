"""FedNova: rounds by hand, the length of a site's path as torch's SGD takes it, and equal steps are FedAvg."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scalar import NAME, HalfSquare, scalars, targets, weight
from support.toy import ADAMW, SGD, Recorder, Toy, World, aggregate, pairs, same_bytes, three_sites

from fedvlp.core.aggregation import Averaging
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, State, Update
from fedvlp.federation.exchange import WorkerPool
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg, FedNova
from fedvlp.run.config import override
from fedvlp.run.presets import get

NOVA = FedNova(local_epochs=1, batch_size=4)


def test_a_round_by_hand() -> None:
    """Batches of 4, eta = 0.1, g = y - t, x = 0. a: 4 records, tau = 1, t = 1; b: 8 records, tau = 2, t = 3.

    a ends at 0.1, b at 0.3 and then 0.57; p = 1/3, 2/3. d_a = -0.1, d_b = -0.57 / 2 = -0.285 (times eta);
    tau_eff = 1/3 + 4/3 = 5/3; x = 5/3 (0.1 / 3 + 2 * 0.285 / 3) = 0.372222. FedAvg's would be 1.24 / 3 = 0.413333.
    """
    data = {"a": targets(4, 1.0), "b": targets(8, 3.0)}
    world = scalars(NOVA, data)
    world.rounds = replace(world.rounds, clip_to_median=0)  # b is more than five times as far as a
    spy = Recorder(world)
    server = world.run(spy)
    assert [weight(reply.state) for _, reply in spy.replies] == pytest.approx([0.1, 0.57])
    assert weight(server.state) == pytest.approx(0.3722222)
    assert weight(scalars(FedAvg(local_steps=1), data).run().state) == pytest.approx((0.1 + 2 * 0.3) / 3)


def test_two_epochs_by_hand_with_three_sites() -> None:
    """A gradient of t throughout, so y = -0.1 tau t and d = t: x = -0.1 tau_eff mean_p t, whatever the steps.

    8, 12 and 9 records are 2, 3 and 2 batches, so tau = 4, 6, 4; p = 8/29, 12/29, 9/29; tau_eff = (32 + 72 + 36) / 29.
    FedAvg would weigh the directions by p tau.
    """
    data = {"a": targets(8, 1.0), "b": targets(12, -2.0), "c": targets(9, 5.0)}
    server = scalars(replace(NOVA, local_epochs=2), data, objective=lambda: HalfSquare(slope=True)).run()
    direction = (8 * 1 + 12 * -2 + 9 * 5) / 29
    assert weight(server.state) == pytest.approx(-0.1 * 140 / 29 * direction)


@pytest.mark.parametrize(("momentum", "warmup"), [(0.0, 0), (0.5, 0), (0.9, 0), (0.0, 3), (0.5, 10)])
def test_the_path_is_the_one_that_torch_takes(momentum: float, warmup: int) -> None:
    """Under a gradient of 1 the model moves by eta |a|: with five steps of SGD, momentum and a warm-up."""
    method = FedNova(local_epochs=5, batch_size=4, momentum=momentum, warmup_steps=warmup)
    training = replace(SGD, momentum=momentum, warmup_steps=warmup)
    world = scalars(method, {"a": targets(4, 1.0)}, training=training, objective=lambda: HalfSquare(slope=True))
    moved = weight(world.site("a").handle(Broadcast(0, "train", world.server().state)).state)
    assert moved == pytest.approx(-0.1 * method.path(5), rel=1e-5)


def test_the_path_by_hand() -> None:
    """Without momentum the number of steps; rho = 0.5: 1 + 1.5 + 1.75, the paper's (3 - 0.5 * 0.875 / 0.5) / 0.5."""
    assert NOVA.path(7) == 7
    assert NOVA.path(0) == 0
    assert replace(NOVA, momentum=0.5).path(3) == pytest.approx(4.25) == pytest.approx((3 - 0.5 * 0.875 / 0.5) / 0.5)
    assert replace(NOVA, warmup_steps=4).path(5) == pytest.approx(0.25 + 0.5 + 0.75 + 1 + 1)


@pytest.mark.parametrize("training", [SGD, replace(ADAMW, warmup_steps=2)])
def test_equal_steps_are_fedavg_bit_for_bit(training: Any) -> None:
    """Sites of 9, 10 and 11 records have two batches of 4 each; and so have all with ``local_epochs=0``."""
    data = {name: pairs(index, 9 + index) for index, name in enumerate("abc")}

    def ended(method: Any) -> State:
        return World(method, data, training, model=lambda: Toy(norm=True, dropout=0.2)).run().state

    expected = ended(FedAvg(local_steps=2))
    same_bytes(ended(replace(NOVA, warmup_steps=training.warmup_steps)), expected)
    same_bytes(ended(FedNova(local_epochs=0, local_steps=2)), expected)


def aggregated(server: Server, *sent: tuple[str, int, float], method: FedNova = NOVA) -> State:
    """The model after updates of (site, samples, value of every tensor)."""
    updates = [
        Update(site, 0, "train", samples, {n: torch.full_like(t, value) for n, t in server.state.items()})
        for site, samples, value in sent
    ]
    aggregate(method, server, updates, "train")
    return server.state


@pytest.mark.parametrize(("kind", "trim"), [("mean", 0.2), ("trimmed", 0.0), ("trimmed", 0.2), ("median", 0.2)])
def test_a_robust_average_is_one_of_directions_and_of_lengths(kind: str, trim: float) -> None:
    """tau = 2, 4, 10 of 8, 16 and 40 records; d = -1, -2, 0, so y = 2, 8, 0.

    The sum: tau_eff = (16 + 64 + 400) / 64 = 7.5, and x = 7.5 (8 * 1 + 16 * 2) / 64 = 4.6875. Of three values a robust
    average is the middle one: tau_eff = 4 and d = -1, so x = 4.
    """
    server = Server(tuple("abc"), {NAME: torch.zeros(1)}, averaging=Averaging(kind, trim))
    state = aggregated(server, ("a", 8, 2.0), ("b", 16, 8.0), ("c", 40, 0.0))
    assert weight(state) == pytest.approx(4.0 if server.averaging.robust else 4.6875)
    assert server.averaging.robust == (kind != "mean" and trim > 0)


@pytest.mark.parametrize("kind", ["trimmed", "median"])
def test_equal_steps_are_fedavg_under_a_robust_average(kind: str) -> None:
    data = {name: pairs(index, 9 + index) for index, name in enumerate("abc")}
    rounds = Rounds(rounds=2, evaluate_every=0, averaging=kind)

    def ended(method: Any) -> State:
        return World(method, data, rounds=rounds, model=lambda: Toy(norm=True)).run().state

    same_bytes(ended(NOVA), ended(FedAvg(local_steps=2)))


def test_running_statistics_are_fedavg_s_mean() -> None:
    """tau = 1, 1, 10: tau_eff = 102 / 12 and W = 102/12 (2 + 1) / 12 = 2.125: a variance would go from 1 to -1.125.

    x = 1 + 2.125 (0 - 1). The counter is not averaged.
    """
    variance, counter = "image_encoder.1.running_var", "image_encoder.1.num_batches_tracked"
    server = Server(tuple("abc"), {NAME: torch.ones(1), variance: torch.ones(1), counter: torch.tensor(7)})
    state = aggregated(server, ("a", 4, 0.0), ("b", 4, 0.0), ("c", 40, 0.0))
    assert weight(state) == pytest.approx(1 - 2.125)
    assert weight(state, variance) == 0
    assert int(state[counter]) == 7


def test_a_lowered_count_weighs_less_and_leaves_the_steps_as_they_were() -> None:
    """c says 400 and counts as 8 (max_share): p = 1/4, 1/4, 1/2. Its direction is y / 100, not y / 2.

    tau_eff, a step size, is that of the lowered counts: 1/4 + 1/4 + 2/2 = 1.5. So c, at 100, moves x by
    1.5 * 1/2 * 1 = 0.75; with 100 steps in tau_eff as well it would be 25 times a step.
    """
    server = Server(tuple("abc"), {NAME: torch.zeros(1)}, samples={"a": 4, "b": 4, "c": 400})
    assert weight(aggregated(server, ("a", 4, 0.0), ("b", 4, 0.0), ("c", 8, 100.0))) == pytest.approx(0.75)


def test_the_loop_tells_it_the_counts_that_sites_sent() -> None:
    """In the first round already: c has most records, so max_share lowers its count."""
    data = {"a": targets(4, 0.0), "b": targets(4, 0.0), "c": targets(40, 1.0)}
    world = scalars(NOVA, data, objective=lambda: HalfSquare(slope=True))
    # y_c = -0.1 * 10; p = 1/4, 1/4, 1/2 of counts 4, 4, 8; tau_eff = 1/4 + 1/4 + 1; d_c = 1
    assert weight(world.run().state) == pytest.approx(-0.1 * 1.5 * 0.5)


def test_nobody_has_records() -> None:
    server = Server(("a",), {NAME: torch.ones(1)})
    assert weight(aggregated(server, ("a", 0, 5.0))) == 1


def test_it_sends_and_keeps_what_fedavg_does(tmp_path: Path) -> None:
    """Steps follow from the count of records, so no number goes up beside it; clipping and noise apply as ever."""
    world = World(NOVA, folder=tmp_path)
    spy, plain = Recorder(world), Recorder(World(FedAvg(local_steps=2)))
    world.run(spy)
    World(FedAvg(local_steps=2)).run(plain)
    for (_, one), (_, other) in zip(spy.replies, plain.replies, strict=True):
        assert (one.state.keys(), one.aux, one.scalars) == (other.state.keys(), other.aux, other.scalars)
    assert not list((tmp_path / "sites").rglob("*.safetensors"))


def test_unequal_steps_go_on_after_a_stop_and_in_workers(tmp_path: Path) -> None:
    """The same bytes in turn, in workers, and in two runs of which the second goes on."""

    def world(name: str, rounds: int = 3) -> World:
        return World(NOVA, training=ADAMW, rounds=Rounds(rounds=rounds, evaluate_every=0), folder=tmp_path / name)

    assert [NOVA.taken(data.num_train) for data in three_sites().values()] == [2, 3, 4]
    expected = world("whole").run().state
    world("stopped", rounds=1).run()
    same_bytes(world("stopped").run().state, expected)
    aside = world("aside")
    with WorkerPool(aside.site, ("a", "b", "c"), 2) as exchange:
        same_bytes(aside.run(exchange).state, expected)


def test_its_settings_follow_those_of_training() -> None:
    demo = get("fednova")
    changed = override(override(demo, "training.batch_size", "16"), "training.warmup_steps", "3")
    assert isinstance(changed.method, FedNova)
    assert (changed.method.batch_size, changed.method.warmup_steps) == (16, 3)
    with pytest.raises(ValueError, match=r"method.batch_size is 7, but it follows training.batch_size"):
        override(demo, "method.batch_size", "7")
    with pytest.raises(ValueError, match="local_epochs is -1"):
        FedNova(local_epochs=-1)


def test_a_warm_up_that_only_the_first_round_has_is_refused() -> None:
    """Otherwise sites would be weighed by steps of a warm-up that they no longer take."""
    demo = get("fednova")
    assert (demo.training.warmup_steps, demo.training.optimizer_state) == (10, "reset")
    with pytest.raises(ValueError, match=r"optimizer_state is keep and warmup_steps 10: FedNova counts"):
        override(demo, "training.optimizer_state", "keep")
    override(override(demo, "training.warmup_steps", "0"), "training.optimizer_state", "keep")
    override(override(demo, "method.local_epochs", "0"), "training.optimizer_state", "keep")
