"""Spec faults, row 22: a disk that is full, for the kernel and not for a patched function (support/full_disk.py).

At the engine, at a site, at the server under FLARE, and for the command: the old file stays whole, the run stops with
the path and the bytes that it needs, and once there is room it ends with the bytes of a run that never stopped.
"""

from __future__ import annotations

import io
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support.flare_memory import MemoryFlare, in_engine, toy_experiment
from support.full_disk import SmallDisk, forked, on_small_disk
from support.toy import Toy, World, same_bytes, small, three_sites

from fedvlp.core.checkpoint import CheckpointError
from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.exchange import SequentialExchange, WorkerPool
from fedvlp.federation.loop import Rounds
from fedvlp.federation.site import failure
from fedvlp.flare.controller import FederatedController
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.privacy_budget import Ledger
from fedvlp.flare.task_handler import TaskHandler
from fedvlp.methods import METHODS, FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import identity
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import TensorBoard
from fedvlp.training.settings import Training

TINY = Experiment(
    "tiny",
    FedAvg(local_steps=1),
    ModelConfig(),
    data=SyntheticCohort(sites=2, size=80),
    training=Training(batch_size=8),
)
BEFORE = 1 << 15  # bytes of room: enough for the records of a phase, not for a checkpoint


def world(folder: Path | None = None, method: str = "fedavg", **options: Any) -> World:
    """Three rounds; a checkpoint takes 190 kB."""
    rounds = Rounds(**{"rounds": 3, "evaluate_every": 0, **options})
    return World(small(METHODS[method]), rounds=rounds, model=lambda: Toy(dim=96), folder=folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def refused(file: str, folder: Path) -> str:
    """The pattern of fedvlp's words: file and folder, why, how much, what to do."""
    where = rf"{file} in {re.escape(str(folder))}"
    return (
        rf"cannot write {where}: the disk is full; it needs [\d,]+ bytes there: [\d,]+ bytes are free on /.*"
        "free space.*resume"
    )


def filled_after(disk: SmallDisk, round: int) -> Any:
    """A report that fills the disk when this round is complete."""

    def report(record: dict[str, Any]) -> None:
        if record["round"] == round:
            disk.fill(BEFORE)

    return report


def test_the_run_stops_and_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = world().run()

    def body(disk: SmallDisk) -> None:
        one = world(disk.folder)
        with pytest.raises(CheckpointError, match=refused(r"server\.safetensors", disk.folder)):
            one.run(report=filled_after(disk, 0))
        kept = contents(disk.folder)
        assert kept.keys() == {"server.safetensors", "history.jsonl", "rounds/round-00001.safetensors"}
        assert kept["server.safetensors"] == kept["rounds/round-00001.safetensors"]
        saved, phase = Server.load(disk.folder / "server.safetensors")
        assert (saved.round, phase, len(saved.history)) == (1, 0, 1)
        disk.make_room()
        same_bytes(one.run().state, whole.state)

    on_small_disk(tmp_path / "disk", body)


def test_the_checkpoints_kept_for_a_rollback_make_room_first(tmp_path: Path) -> None:
    """Full after three rounds: two older checkpoints are given up for the fourth, and the run is not disturbed."""
    whole = world(rounds=4).run()

    def body(disk: SmallDisk) -> list[str]:
        one = world(disk.folder, rounds=4)
        same_bytes(one.run(report=filled_after(disk, 2)).state, whole.state)
        return sorted(file.name for file in (disk.folder / "rounds").iterdir())

    left = on_small_disk(tmp_path / "disk", body)
    assert left in (["round-00003.safetensors", "round-00004.safetensors"],
                    ["round-00002.safetensors", "round-00003.safetensors", "round-00004.safetensors"])  # fmt: skip


def test_so_it_does_where_a_file_may_not_grow(tmp_path: Path) -> None:
    """The kernel's limit for the size of a file, as quotas set it, for which nothing has to be mounted."""
    whole = world().run()

    def body() -> None:
        one = world(tmp_path)
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        with pytest.raises(CheckpointError, match=r"server\.safetensors in .*File too large.*it needs [\d,]+ bytes"):
            one.run(report=lambda record: resource.setrlimit(resource.RLIMIT_FSIZE, (BEFORE, usual[1])))
        assert Server.load(tmp_path / "server.safetensors")[0].round == 1
        assert not list(tmp_path.glob(".*"))
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        same_bytes(one.run().state, whole.state)

    forked(body)


class WithoutB:
    """The sites of a world; b is not even asked in round 1."""

    def __init__(self, one: World) -> None:
        self.inner = SequentialExchange(one.site)

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        asked = {site: m for site, m in messages.items() if (site, m.round) != ("b", 1)}
        yield from self.inner(asked)
        if len(asked) < len(messages):
            yield "b", Failure(FailureKind.LOST, "gone")


@pytest.mark.parametrize(
    ("happens", "said"),
    [("fill", r"the disk is full; it needs [\d,]+ bytes"), ("take_nothing", "Read-only file system")],
)
def test_a_site_misses_the_phase_and_goes_on_from_its_last_memory(tmp_path: Path, happens: str, said: str) -> None:
    """The disk of b takes nothing in round 1: the others' bytes, and later b's own, are as if it had been away."""
    without = world(tmp_path / "without", "local")
    expected = without.run(WithoutB(without))

    def body(disk: SmallDisk) -> None:
        before: dict[str, bytes] = {}

        def report(record: dict[str, Any]) -> None:
            if record["round"] == 0:
                before.update(contents(disk.folder))
                getattr(disk, happens)()
            if record["round"] == 1:
                assert contents(disk.folder) == before
                disk.make_room()

        seen = world(tmp_path / "run", "local").run(report=report)
        assert [list(record["dropped"]) for record in seen.history] == [[], ["b"], []]
        assert re.search(said, seen.history[1]["dropped"]["b"])
        same_bytes(seen.state, expected.state)
        assert contents(disk.folder).keys() == contents(tmp_path / "without" / "sites" / "b").keys()
        for file, content in contents(tmp_path / "without" / "sites" / "b").items():
            assert (disk.folder / file).read_bytes() == content

    on_small_disk(tmp_path / "run" / "sites" / "b", body)


def test_a_read_only_kit_is_called_so_at_every_folder_that_a_job_writes(tmp_path: Path) -> None:
    """At a site under FLARE: a job that runs, one whose process began anew, a new run, and the privacy ledger."""
    state = Assembly(TINY).server(("site-1",)).state

    def ask(handler: TaskHandler, number: str) -> Any:
        run = {**identity(TINY, f"tiny/{number}"), "id": number[-1] * 32}
        return handler.answer(Broadcast(0, "train", state), run, lambda: False)

    def body(disk: SmallDisk) -> None:
        paths = SitePaths("site-1", str(disk.folder / "runs"), "")
        running = TaskHandler(TINY, paths)
        ask(running, "001")
        before = contents(disk.folder)
        disk.take_nothing()
        tasks = {
            "running": lambda: ask(running, "001"),
            "restarted": lambda: ask(TaskHandler(TINY, paths), "001"),
            "new": lambda: ask(TaskHandler(TINY, paths), "002"),
            "ledger": lambda: Ledger(disk.folder / "privacy" / "a", disk.folder / "runs" / "b").spend(
                "x", 8.0, 1, 1e-5
            ),
        }
        for name, task in tasks.items():
            with pytest.raises(OSError, match="Read-only file system") as raised:
                task()
            told = failure(raised.value)
            assert "Read-only file system; this account must" in told.text, name
            assert told.public == told.text
            assert str(disk.folder) not in told.text
        assert contents(disk.folder) == before
        disk.make_room()
        ask(running, "001")

    on_small_disk(tmp_path / "kit", body)


@pytest.mark.parametrize("averaging", ["mean", "median"])
def test_updates_that_wait_on_disk_have_no_room(
    tmp_path: Path, averaging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models' updates wait in the run's spool. Nothing half-written stays there, and the run resumes."""
    monkeypatch.setattr("fedvlp.core.tensor_file.PARK_BYTES", 0)
    whole = world(averaging=averaging).run()

    def body(disk: SmallDisk) -> None:
        one = world(disk.folder, averaging=averaging)
        with pytest.raises(CheckpointError, match=refused(r"\w+\.safetensors", disk.folder / "spool")):
            one.run(report=filled_after(disk, 0))
        assert not list((disk.folder / "spool").iterdir())
        disk.make_room()
        same_bytes(one.run().state, whole.state)

    on_small_disk(tmp_path / "disk", body)


@pytest.mark.parametrize(("moment", "folder"), [("a checkpoint", "checkpoints"), ("the results", "")])
def test_at_the_server_the_job_ends_with_the_reason_and_the_next_one_goes_on(
    tmp_path: Path, moment: str, folder: str
) -> None:
    """FLARE's controller: in round 1, or when the trained model is written. The same job then ends with all bytes."""
    finish = FederatedController._finish

    def body(disk: SmallDisk) -> None:
        patch = pytest.MonkeyPatch()
        flare = MemoryFlare(tmp_path, patch, toy_experiment(), three_sites())
        if moment == "a checkpoint":
            flare.clock.plan(2.0, disk.fill)
        else:
            patch.setattr(FederatedController, "_finish", lambda *given: (disk.fill(), finish(*given)))
        job = flare.submit()
        assert re.search(f"CheckpointError: {refused(r'[a-z_.]+', flare.run.path / folder)}", job.panic)
        saved = Server.load(flare.run.checkpoint)[0]
        assert len(saved.history) == (1 if moment == "a checkpoint" else 3)
        assert not flare.run.model.exists()
        assert not list(disk.folder.rglob("*.tmp"))
        disk.make_room()
        patch.setattr(FederatedController, "_finish", finish)
        assert flare.submit().panic == ""
        assert flare.run.path.name == "001"
        server, model = in_engine(flare.experiment, flare.data, tmp_path / "plain")
        assert flare.run.model.read_bytes() == model.read_bytes()
        same_bytes(Server.load(flare.run.checkpoint)[0].state, server.state)

    on_small_disk(tmp_path / "server", body)


def test_curves_without_room_hide_no_other_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TensorBoard's own writer raises what its thread met, in the middle of a run or when it is closed."""
    record = {"phase": "train", "seconds": 1.0, "members": [], "memory": {}, "sites": {}, "dropped": {}}
    record["server"] = {f"update_norm/{site}": 1.0 for site in range(50)}

    def body(disk: SmallDisk) -> list[str]:
        board = TensorBoard(disk.folder / "tb")
        board({**record, "round": 0})
        disk.fill()
        for round in range(1, 200):
            board({**record, "round": round})
        board.close()
        return [entry.getMessage() for entry in caplog.records]

    said = on_small_disk(tmp_path / "disk", body)
    assert said
    assert all(re.search(r"curves are not .*in .*: No space left on device", line) for line in said)


def test_a_model_that_has_no_room_says_which_disk_and_how_much_is_missing(tmp_path: Path) -> None:
    """safetensors, which has no number for it, and the files beside the weights; nothing half-written stays."""
    model = ModelConfig().build(0)
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())

    def body(disk: SmallDisk) -> list[str]:
        said = []
        for spare in (BEFORE, size + 4096):
            (disk.folder / "model").mkdir(exist_ok=True)
            disk.fill(spare)
            with pytest.raises(CheckpointError) as raised:
                model.save(disk.folder / "model")
            assert contents(disk.folder) == {}
            said.append(str(raised.value))
            disk.make_room()
        model.save(disk.folder / "model")
        return said

    weights, beside = on_small_disk(tmp_path / "disk", body)
    for said in (weights, beside):
        assert re.search(refused(r"model\.safetensors", tmp_path / "disk" / "model"), said), said
        assert f"are free on {tmp_path / 'disk'}" in said
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= bytes| are missing)", weights)]
    needed, free, missing = numbers
    assert (needed, free) == (size, needed - missing)


def test_a_command_that_writes_says_which_disk_is_full(tmp_path: Path) -> None:
    """What it wrote with, fedvlp's own files, Python's or a library's, does not matter."""
    model = ModelConfig().build(0)
    model.save(tmp_path / "model")

    def body(disk: SmallDisk) -> list[str]:
        commands = {
            "files of fedvlp": ("jobs", "export", "fedavg", str(disk.folder / "job")),
            "Python": ("new", "method", "my-own", "--into", str(disk.folder / "plugin")),
            "safetensors": (
                "export",
                str(tmp_path / "model"),
                "--out",
                str(disk.folder / "out"),
                "--to",
                "monai-bundle",
            ),
        }
        disk.fill()
        said = []
        for name, words in commands.items():
            code, text = fedvlp(*words)
            assert code == 2, name
            said.append(text)
        return said

    for said in on_small_disk(tmp_path / "disk", body):
        assert "the disk is full" in said
        assert f"bytes are free on {tmp_path / 'disk'}" in said


SMALL = (
    "--sites", "2", "--workers", "1", "--set", "data.size=40", "--set", "rounds.rounds=2", "--set",
    "method.local_steps=1", "--set", "training.batch_size=4", "--set", "rounds.evaluate_every=0",
)  # fmt: skip


def fedvlp(*arguments: str) -> tuple[int, str]:
    """Exit code and error stream of the command, in this process."""
    from fedvlp.cli import main

    errors = io.StringIO()
    sys.argv = ["fedvlp", *arguments]
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), errors.getvalue()
    return 0, errors.getvalue()


@pytest.mark.slow(seconds=5)
def test_the_command_exits_with_2_and_one_line_and_resumes(tmp_path: Path) -> None:
    """There is room for one checkpoint and a half: the first is written, its successor beside it is not."""

    def body(disk: SmallDisk) -> None:
        runs = str(disk.folder / "runs")
        state = presets.get("fedavg").model.build(0).state_dict()
        disk.fill(int(1.5 * sum(t.numel() * t.element_size() for t in state.values())))
        code, said = fedvlp("simulate", "fedavg", "--runs", runs, *SMALL)
        folder = RunFolder(disk.folder / "runs" / "fedavg" / "001")
        assert code == 2, said
        assert re.search("fedvlp: " + refused(r"[\w.]+", folder.checkpoint.parent), said)
        assert "Traceback" not in said
        assert Server.load(folder.checkpoint)[0].round == 1
        disk.make_room()
        assert fedvlp("simulate", "--resume", str(folder.path)) == (0, "")
        assert fedvlp("simulate", "fedavg", "--runs", runs, *SMALL)[0] == 0
        whole = RunFolder(disk.folder / "runs" / "fedavg" / "002")
        assert folder.model.read_bytes() == whole.model.read_bytes()

    on_small_disk(tmp_path / "disk", body)


def test_side_by_side_a_sites_own_process_says_so(tmp_path: Path) -> None:
    """A worker process, not the engine's own, finds the disk of its site full; the others finish the round."""

    def body(disk: SmallDisk) -> None:
        one = world(tmp_path / "run", "local", rounds=2)
        disk.fill()
        with WorkerPool(one.site, ("a", "b", "c"), 3) as exchange:
            history = one.run(exchange).history
        assert [list(record["dropped"]) for record in history] == [["b"], ["b"]]
        assert re.search(r"the disk is full; it needs [\d,]+ bytes", history[0]["dropped"]["b"])
        assert contents(disk.folder) == {}

    on_small_disk(tmp_path / "run" / "sites" / "b", body)
