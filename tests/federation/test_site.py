"""A site's task: what it receives, measures and returns, its random numbers, and its memory on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy import SGD, Toy, World, differs, pairs, three_sites
from torch import Tensor

from fedvlp.core.checkpoint import CheckpointError
from fedvlp.core.client import Client, StateMismatchError
from fedvlp.core.method import Method
from fedvlp.core.site_error import NotFiniteError
from fedvlp.core.types import EVALUATE, Batch, Broadcast, State
from fedvlp.federation.site import Site, reason
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.training.local_training import Aborted


@dataclass(frozen=True)
class Counts(Method):
    """Remembers how many tasks it has answered, and the round of the last one."""

    def upload(self, client: Client, message: Broadcast) -> State:
        count = client.memory.get("count", torch.zeros(1)) + 1
        client.memory = {"count": count, "round": torch.tensor([float(message.round)])}
        return super().upload(client, message)


def message(world: World, round: int = 0, phase: str = "train", **options: Any) -> Broadcast:
    return Broadcast(round, phase, world.server().state, **options)


def task(site: Site, world: World, round: int, phase: str = "train") -> float:
    """Answers one task; the count that the site then remembers."""
    site.handle(message(world, round, phase))
    return site.client.memory["count"].item()


class OwnError(ValueError):
    """As if it were worded by fedvlp."""


OwnError.__module__ = "fedvlp.core.x"


def test_only_errors_of_ours_are_told_in_words() -> None:
    assert reason(FileNotFoundError("/data/patient-17/report.txt")) == "FileNotFoundError"
    assert reason(RuntimeError("report: small effusion")) == "RuntimeError"
    assert reason(OwnError("lower the rate")) == "OwnError: lower the rate"
    assert reason(NotFiniteError("a: loss is nan")) == "NotFiniteError: a: loss is nan"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, whose generator is set")
def test_a_task_notes_nothing_for_devices_that_are_not_there() -> None:
    """torch keeps the text of the caller's stack for each of their seeds, for as long as the process lives."""
    world = World(Method())
    before = len(torch.cuda._queued_calls)
    world.site("a").handle(message(world))
    assert len(torch.cuda._queued_calls) == before


@pytest.fixture(params=["disk", "process"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "disk" else None


def test_the_reply_says_whose_and_what_it_is() -> None:
    """Only training records weigh: not the 5 and 3 that are held out."""
    data = three_sites()
    data["b"].content |= {split: pairs(7, count).content["train"] for split, count in (("val", 5), ("test", 3))}
    world = World(Method(local_steps=2), data)
    update = world.site("b").handle(message(world, 3))
    assert (update.site, update.round, update.phase, update.num_samples) == ("b", 3, "train", 12)
    assert update.state.keys() == world.server().state.keys()
    assert set(update.metrics) == {"loss/contrastive", "seconds"}
    assert differs(update.state, world.server().state)


def test_a_state_of_another_model_is_refused() -> None:
    world = World(Method())
    with pytest.raises(StateMismatchError, match="same experiment"):
        world.site("a").handle(Broadcast(0, "train", {"x": torch.zeros(1)}))


def test_the_global_generator_is_left_as_it_was() -> None:
    world = World(Method(local_steps=1), model=lambda: Toy(dropout=0.5))
    before = torch.get_rng_state()
    world.site("a").handle(message(world))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_differs_by_run_seed_site_and_round() -> None:
    @dataclass(frozen=True)
    class Draws(Method):
        def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
            return {**super().losses(client, batch, message), "draw": torch.rand(())}

    def draw(name: str = "a", round: int = 0, seed: int = 0) -> float:
        world = World(Draws(local_steps=1))
        world.rounds = replace(world.rounds, seed=seed)
        return world.site(name).handle(message(world, round)).metrics["loss/draw"]

    assert len({draw(), draw("b"), draw(round=1), draw(seed=1)}) == 4
    assert draw() == draw()


class Recorder:
    """An evaluation that notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, client: Client, splits: tuple[str, ...]) -> dict[str, float]:
        self.calls.append(splits)
        assert not client.model.training
        assert not torch.is_grad_enabled()
        return {"bias": float(client.model.text_head.bias.sum())}


def test_the_received_model_is_measured_not_the_trained_one() -> None:
    recorder = Recorder()
    world = World(Method(local_steps=2), evaluate=recorder)
    update = world.site("a").handle(message(world, evaluate=1))
    assert update.metrics["bias"] == pytest.approx(float(world.server().state["text_head.bias"].sum()))
    assert update.metrics["bias"] != pytest.approx(float(update.state["text_head.bias"].sum()))


def test_what_is_measured_is_what_is_asked_for() -> None:
    recorder = Recorder()
    world = World(Method(local_steps=0), evaluate=recorder)
    for wanted in (0, 1, 2):
        world.site("a").handle(message(world, evaluate=wanted))
    world.site("a").handle(message(world))
    assert recorder.calls == [("val",), ("val", "test")]


@dataclass(frozen=True)
class TwoPhases(Counts):
    def phases(self, round: int) -> tuple[str, ...]:
        return ("one", "two")

    def probes(self) -> tuple[str, ...]:
        return ("seen",)

    def probe(self, client: Client, message: Broadcast) -> dict[str, float]:
        assert not torch.is_grad_enabled()
        assert not client.model.image_encoder.training
        return {"seen": 1.0}


def test_probe_and_evaluation_belong_to_the_first_phase() -> None:
    recorder = Recorder()
    world = World(TwoPhases(local_steps=1), evaluate=recorder)
    site = world.site("a")
    first, second = (site.handle(message(world, 0, phase, evaluate=1)) for phase in ("one", "two"))
    assert first.measured["probe/seen"] == 1.0
    assert not {"probe/seen", "bias"} & set(second.measured)
    assert recorder.calls == [("val",)]


def test_an_evaluation_trains_and_sends_nothing() -> None:
    recorder, drawn = Recorder(), []
    data = pairs(0)
    data.tick = lambda: drawn.append(1)
    world = World(Counts(local_steps=2), {"a": data}, evaluate=recorder)
    update = world.site("a").handle(message(world, 2, EVALUATE, evaluate=2))
    assert update.state == {}
    assert (update.phase, recorder.calls, drawn) == (EVALUATE, [("val", "test")], [])


def test_a_repeated_task_starts_from_the_same_memory(folder: Path | None) -> None:
    world = World(TwoPhases(local_steps=1), folder=folder)
    site = world.site("a")
    order = [(0, "one"), (0, "one"), (0, "two"), (1, "one"), (1, "one"), (1, "two"), (1, "two"), (2, "one")]
    assert [task(site, world, *which) for which in order] == [1, 1, 2, 3, 3, 4, 4, 5]


def test_a_new_process_goes_on_from_the_disk(tmp_path: Path) -> None:
    world = World(Counts(local_steps=1), folder=tmp_path)
    assert [task(world.site("a"), world, round) for round in range(3)] == [1, 2, 3]
    assert task(world.site("b"), world, 2) == 1  # another site's memory is another


def test_as_many_versions_are_kept_as_the_server_can_be_put_back(tmp_path: Path) -> None:
    """Five rounds back on disk, and what was before them; in a process, which cannot be put back, only the last two."""
    world = World(Counts(local_steps=1), folder=tmp_path)
    for round in range(9):
        task(world.site("a"), world, round)
    names = sorted(file.name for file in (tmp_path / "sites" / "a").iterdir())
    assert names == [*(f"0000{round}-0.safetensors" for round in range(3, 9)), "forgotten.00000-0"]
    memory = SiteMemory(None)
    for round in range(5):
        memory.after((round, 0), {"x": torch.ones(1)})
    assert sorted(memory._unsaved) == [(3, 0), (4, 0)]


def test_of_a_round_that_is_over_the_last_phase_is_kept(folder: Path | None) -> None:
    """Runs are put back to whole rounds; of the round that lasts, the phase before may be asked for again."""
    memory = SiteMemory(folder)
    for task_ in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]:
        memory.after(task_, {"x": torch.ones(1)})
    assert sorted(memory._versions()) == [(0, 2), (1, 1), (1, 2)]


def test_nothing_is_kept_of_a_task_that_failed(folder: Path | None) -> None:
    @dataclass(frozen=True)
    class Overwrites(Counts):
        def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
            if message.round == 1:
                client.memory = {"count": torch.tensor([99.0])}
                return {"broken": torch.tensor(float("nan"), requires_grad=True)}
            return super().losses(client, batch, message)

    world = World(Overwrites(local_steps=1), folder=folder)
    site = world.site("a")
    assert task(site, world, 0) == 1
    with pytest.raises(FloatingPointError):
        site.handle(message(world, 1))
    with pytest.raises(Aborted):
        site.handle(message(world, 1), should_stop=lambda: True)
    assert site.memory.before((9, 0))["count"].item() == 1
    assert task(site, world, 2) == 2


def test_a_corrupt_memory_is_refused_by_name(tmp_path: Path) -> None:
    world = World(Counts(local_steps=1), folder=tmp_path)
    task(world.site("a"), world, 0)
    file = tmp_path / "sites" / "a" / "00000-0.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="00000-0"):
        world.site("a").handle(message(world, 1))
    assert task(world.site("a"), world, 0) == 1  # the task that wrote it can be repeated


def test_memory_in_this_process_is_a_copy() -> None:
    memory, tensor = SiteMemory(None), torch.ones(2)
    memory.after((0, 0), {"x": tensor})
    tensor.zero_()
    assert memory.before((1, 0))["x"].tolist() == [1.0, 1.0]


def test_memory_of_later_tasks_is_not_seen(folder: Path | None) -> None:
    memory = SiteMemory(folder)
    memory.after((3, 1), {"x": torch.ones(1)})
    assert memory.newest()["x"].item() == 1.0
    assert memory.before((3, 1)) == memory.before((0, 0)) == {}
    assert memory.before((3, 2))["x"].item() == 1.0
    assert memory.before((10, 0))["x"].item() == 1.0


def test_clear_forgets(folder: Path | None) -> None:
    memory = SiteMemory(folder)
    memory.after((0, 0), {"x": torch.ones(1)})
    memory.clear()
    assert memory.before((1, 0)) == {}


def test_a_run_that_begins_again_in_the_same_folder_keeps_its_memory(folder: Path | None) -> None:
    """A server that lost its checkpoint, or a folder's number used again: rounds 8 and 9 are no longer of this run."""
    world = World(Counts(local_steps=1), folder=folder)
    site = world.site("a")
    for round in (8, 9):
        task(site, world, round)
    assert [task(site, world, round) for round in (0, 1, 2)] == [1, 2, 3]
    assert site.memory.newest()["count"].item() == 3


def test_training_and_steps_come_from_the_sites_own_configuration() -> None:
    one = World(Method(local_steps=1)).site("a").handle(message(World(Method())))
    other = World(Method(local_steps=1), training=replace(SGD, lr=0.2)).site("a").handle(message(World(Method())))
    start = World(Method()).server().state
    for name in start:
        assert torch.allclose(2 * (one.state[name] - start[name]), other.state[name] - start[name], atol=1e-6)
