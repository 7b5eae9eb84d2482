"""A poisoned round is undone by one command, and the run goes on with the bytes of one in which it never was."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.laboratory import METHODS
from support.presets import SMALL
from support.toy import World, same_bytes, small

from fedvlp.cli import main
from fedvlp.core.checkpoint import CheckpointError, load_tensors
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.core.snapshots import Snapshots
from fedvlp.core.types import Broadcast, Update
from fedvlp.federation.codec import Wire
from fedvlp.federation.loop import QuorumLostError, Rounds
from fedvlp.federation.site import Site
from fedvlp.federation.site_memory import MemoryGoneError, SiteMemory
from fedvlp.methods import FedAvg, FedRGB
from fedvlp.run import measurements
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.lock import FolderInUseError, only_writer
from fedvlp.run.rollback import RollbackError, rollback
from fedvlp.run.simulate import simulate

UNCLIPPED = replace(
    SMALL, data=replace(SMALL.data, sites=3, size=72), rounds=Rounds(rounds=3, evaluate_every=0, clip_to_median=0)
)

Change = Callable[[Update], Update]


def poisoned(update: Update) -> Update:
    return replace(update, state={name: torch.full_like(t, 3e38) for name, t in update.state.items()})


def refused(update: Update) -> Update:
    return replace(update, state={name: t * torch.nan for name, t in update.state.items()})


def run(experiment: Experiment, folder: RunFolder, change: Change | None = None) -> None:
    """Simulates; site-2's updates of round 1 are changed."""
    honest = Site.handle

    def handle(self: Site, message: Broadcast, *rest: Any) -> Update:
        update = honest(self, message, *rest)
        hit = change is not None and (self.client.name, message.round) == ("site-2", 1)
        return change(update) if hit and change else update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Site, "handle", handle)
        simulate(experiment, folder)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["fedvlp", "jobs", "rollback", *map(str, arguments)])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    main()


@pytest.mark.parametrize(
    ("method", "wire", "optimizer_state"),
    [
        (FedAvg(local_steps=1), Wire(), "reset"),
        pytest.param(
            FedRGB(local_steps=1, aligner_steps=1, dro_batch=4), Wire(), "keep", marks=pytest.mark.slow(seconds=10)
        ),
        pytest.param(FedAvg(local_steps=1), Wire("bfloat16", "int8"), "reset", marks=pytest.mark.slow(seconds=10)),
    ],
    ids=["fedavg", "fedrgb with kept moments", "fedavg in 8 bits"],
)
def test_a_poisoned_round_is_undone_by_one_command(
    method: Method, wire: Wire, optimizer_state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3e38 is finite: the round takes it, and every site computes NaN. Put back, that update is refused."""
    training = replace(UNCLIPPED.training, optimizer_state=optimizer_state)
    experiment = replace(UNCLIPPED, method=method, wire=wire, training=training)
    folder = RunFolder.create(tmp_path / "runs", experiment)
    with pytest.raises(QuorumLostError, match=r"round [12] .*nan at step 0"):
        run(experiment, folder, poisoned)
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, folder.path, "--round", 1)
    assert not ended.value.code
    assert [row.split(",")[0] for row in (folder.path / "metrics.csv").read_text().splitlines()[1:2]] == ["0"]
    run(experiment, folder, refused)
    other = RunFolder.create(tmp_path / "runs", experiment)
    run(experiment, other, refused)
    assert [list(record["dropped"]) for record in folder.history()] == [
        ["site-2"] if record["round"] == 1 else [] for record in other.history()
    ]
    same_bytes(load_tensors(folder.model)[0], load_tensors(other.model)[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), replace(UNCLIPPED, method=FedAvg(local_steps=1)))
    run(folder.experiment(), folder)
    return folder


@pytest.fixture
def finished(whole: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of one run."""
    return RunFolder(shutil.copytree(whole.path, tmp_path / "runs" / whole.path.parent.name / whole.path.name))


def test_a_finished_run_goes_on_as_if_it_had_not(finished: RunFolder) -> None:
    """Its model is of the rounds that are undone: gone, and FLARE would resume it; then the same bytes as before."""
    before = finished.model.read_bytes()
    (finished.path / "run_status.json").write_text(json.dumps({"status": "finished", "reason": ""}))
    assert RunFolder.latest(finished.path.parents[1], finished.experiment()) is None
    assert rollback(finished, 2) == 3
    assert not finished.model.exists()
    assert not (finished.path / "summary.json").exists()
    assert finished.status() == {
        "schema": 1, "status": "stopped", "reason": "put back to before round 2; submit the same job",
        "summary": "stopped",
    }  # fmt: skip
    assert RunFolder.latest(finished.path.parents[1], finished.experiment()) == finished
    assert [record["round"] for record in finished.history()] == [0, 1]
    run(finished.experiment(), finished)
    assert finished.model.read_bytes() == before


def test_what_was_measured_of_the_undone_model_goes_with_it(finished: RunFolder) -> None:
    """What fedvlp wrote: files that a report reads, those of evaluations, and the pages. A person's own file stays."""
    folder = measurements.folder_of(finished)
    folder.mkdir()
    ours = [
        "recall.csv", "zero-shot-findings.csv", "audit.json", "measured.json", "linear-probe.csv", "retrieval.csv",
        "linear-probe-0123abcd-against.csv", "zero-shot.png", "distortion-own.csv", "similarity.png",
    ]  # fmt: skip
    for name in (*ours, "vqattro.csv", "notes.txt"):
        (folder / name).touch()
    for films in (False, True):
        finished.page(films).touch()
    rollback(finished, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "vqattro.csv"]
    assert not list(finished.path.glob("*.html"))


def test_round_0_is_the_beginning(finished: RunFolder) -> None:
    before = finished.model.read_bytes()
    assert rollback(finished, 0) == 3
    assert not finished.checkpoint.exists()
    assert Snapshots(finished.checkpoint).rounds() == []
    run(finished.experiment(), finished)
    assert finished.model.read_bytes() == before


def test_a_round_that_is_not_kept_is_refused_and_nothing_changes(finished: RunFolder) -> None:
    files = (path for path in finished.path.rglob("*.*") if path.is_file() and path.name != "writer.lock")
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(
        RollbackError, match=r"is in round 3 and cannot .* before round 4; .* choose one of 0, 1, 2, 3 "
    ):
        rollback(finished, 4)
    snapshots = Snapshots(finished.checkpoint)
    snapshots.file(2).unlink()
    snapshots.file(2).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="round-00002"):
        rollback(finished, 2)
    assert {path: path.read_bytes() for path in before} == before | {snapshots.file(2): b"damaged"}


def test_a_run_that_somebody_writes_or_that_has_not_begun_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    with only_writer(finished.path), pytest.raises(FolderInUseError, match="is in use"):
        rollback(finished, 1)
    with pytest.raises(RollbackError, match="no complete phase"):
        rollback(RunFolder.create(tmp_path / "runs", finished.experiment()), 0)
    with pytest.raises(ValueError, match="holds no run"):
        rollback(RunFolder(tmp_path / "nowhere"), 0)
    assert not (tmp_path / "nowhere").exists()


# What the server keeps


def world(folder: Path, rounds: int = 3, name: str = "fedavg", **options: Any) -> World:
    return World(small(METHODS[name]), rounds=Rounds(rounds=rounds, evaluate_every=0, **options), folder=folder)


@pytest.mark.parametrize("name", cases(METHODS))
def test_every_method_goes_on_from_a_kept_checkpoint(name: str, tmp_path: Path) -> None:
    """Sites keep their later memory until they take part again, as those of FLARE do."""
    one = world(tmp_path, 3, name)
    whole = one.run()
    for round in (2, 1):
        Snapshots(tmp_path / "server.safetensors").restore(round)
        again = one.run()
        same_bytes(again.state, whole.state)
        same_bytes(again.memory, whole.memory)


def test_the_last_five_are_kept_and_the_sites_reach_as_far(tmp_path: Path) -> None:
    """After 8 rounds: before rounds 4 to 8. FedRGB's sites remember their aligners; before round 3 they are gone."""
    one = world(tmp_path, 8, "fedrgb")
    whole = one.run()
    snapshots = Snapshots(tmp_path / "server.safetensors")
    assert snapshots.rounds() == [4, 5, 6, 7, 8]
    memory = SiteMemory(tmp_path / "sites" / "a")
    assert all(memory.reaches((round, 0)) for round in (0, 4, 5, 6, 7, 8))
    assert not memory.reaches((2, 0))
    with pytest.raises(MemoryGoneError, match="before round 2: put the run back by at most 5 rounds, or to round 0"):
        memory.before((2, 0))
    snapshots.restore(4)
    assert snapshots.rounds() == [4]
    same_bytes(one.run().state, whole.state)
    assert snapshots.rounds() == [4, 5, 6, 7, 8]


def test_a_kept_checkpoint_is_the_server_at_the_beginning_of_the_round(tmp_path: Path) -> None:
    """Methods with several phases are put back to whole rounds; the links cost no room."""
    world(tmp_path, 3, "feddra").run()
    snapshots = Snapshots(tmp_path / "server.safetensors")
    for round in (1, 2, 3):
        server, phase = Server.load(snapshots.file(round), snapshots.checkpoint)
        assert (server.round, phase, len(server.history)) == (round, 0, 2 * round)
    assert snapshots.file(3).samefile(tmp_path / "server.safetensors")


def test_a_run_stopped_before_its_checkpoint_was_kept_keeps_it_when_it_goes_on(tmp_path: Path) -> None:
    world(tmp_path, 2).run()
    snapshots = Snapshots(tmp_path / "server.safetensors")
    snapshots.file(2).unlink()
    world(tmp_path, 3).run()
    assert snapshots.rounds() == [1, 2, 3]
    assert Server.load(snapshots.file(2), snapshots.checkpoint)[0].round == 2


# A disk that has no room, a file system without links


def test_on_a_full_disk_the_oldest_make_room_and_the_newest_stays(tmp_path: Path) -> None:
    """Rounds 1 and 2 are given up before the third try succeeds; round 3 is the checkpoint itself and frees nothing."""
    world(tmp_path, 3).run()
    snapshots, tries = Snapshots(tmp_path / "server.safetensors"), []

    def write(room_after: int) -> None:
        tries.append(snapshots.rounds())
        if len(tries) < room_after:
            error = CheckpointError("no room")
            error.full = True
            raise error

    snapshots.save(lambda: write(3))
    assert tries == [[1, 2, 3], [2, 3], [3]]
    tries.clear()
    with pytest.raises(CheckpointError, match="no room"):
        snapshots.save(lambda: write(9))
    assert tries == [[3]]
    assert Server.load(tmp_path / "server.safetensors")[0].round == 3


def test_another_failure_gives_nothing_up(tmp_path: Path) -> None:
    world(tmp_path, 3).run()
    snapshots = Snapshots(tmp_path / "server.safetensors")

    def write() -> None:
        raise CheckpointError("not writable")

    with pytest.raises(CheckpointError, match="not writable"):
        snapshots.save(write)
    assert snapshots.rounds() == [1, 2, 3]


def test_where_there_are_no_links_they_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    one = world(tmp_path, 3)
    whole = one.run()
    snapshots = Snapshots(tmp_path / "server.safetensors")
    assert snapshots.rounds() == [1, 2, 3]
    assert not snapshots.file(3).samefile(tmp_path / "server.safetensors")
    snapshots.restore(1)
    same_bytes(one.run().state, whole.state)


def test_what_cannot_be_kept_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a link nor room for a copy: the run ends as it would, with a warning a round and no rubbish."""

    def full(source: Any, target: Any) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def refuse(source: Any, target: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("shutil.copyfile", full)
    server = world(tmp_path / "here", 2).run()
    same_bytes(server.state, world(tmp_path / "there", 2).run().state)
    assert list((tmp_path / "here" / "rounds").iterdir()) == []
    said = [message for message in caplog.messages if "is not kept" in message]
    assert said[:2] == [
        f"round {round}: the checkpoint is not kept beside the newest one: No space left on device; "
        "the run cannot be put back to here"
        for round in (1, 2)
    ]
