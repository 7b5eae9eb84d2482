"""The run's folder is in what ``nvflare job download`` fetches, however the job ended; a full disk costs that copy."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from nvflare.apis.event_type import EventType
from support.flare_memory import Engine, Fate, MemoryFlare, toy_experiment
from support.full_disk import SmallDisk, on_small_disk
from support.toy import three_sites

from fedvlp.flare.paths import SIMULATED
from fedvlp.flare.results import HOME, ResultsInJob
from fedvlp.flare.tracking import RUN_FOLDER


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run: a model, a status, and what large updates waited in."""
    folder = tmp_path / "runs" / "fedavg" / "001"
    for name in ("model/model.safetensors", "run_status.json", "spool/update.safetensors", "tb/server/events"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def files(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def end(tmp_path: Path, run: Path | None, job: str = "job-1", event: str = EventType.END_RUN) -> Path:
    """FLARE's event at the server; where the copy is expected."""
    engine = Engine("server", tmp_path / "server", job)
    fl_ctx = engine.new_context()
    if run is not None:
        fl_ctx.set_prop(RUN_FOLDER, str(run), private=True, sticky=True)
    ResultsInJob().handle_event(event, fl_ctx)
    return tmp_path / "server" / job / HOME


def test_at_its_end_the_job_has_the_whole_run_but_what_was_under_way(tmp_path: Path, run: Path) -> None:
    expected = {name: text for name, text in files(run).items() if not name.startswith("spool/")}
    target = end(tmp_path, run)
    assert len(expected) == 3
    assert files(target) == expected
    assert files(run).items() >= expected.items(), "the server keeps its copy"


def test_tensors_are_linked_and_what_is_written_in_place_is_copied(tmp_path: Path, run: Path) -> None:
    """The server's tables grow when the run goes on; the job's copy does not."""
    target = end(tmp_path, run)
    linked = {name for name in files(target) if (target / name).samefile(run / name)}
    assert linked == {"model/model.safetensors"}


@pytest.mark.parametrize(
    ("job", "event", "named"),
    [(SIMULATED, EventType.END_RUN, True), ("job-1", EventType.START_RUN, True), ("job-1", EventType.END_RUN, False)],
    ids=["simulator", "another event", "no run was begun"],
)
def test_otherwise_nothing_is_copied(tmp_path: Path, run: Path, job: str, event: str, named: bool) -> None:
    end(tmp_path, run if named else None, job, event)
    assert not (tmp_path / "server").exists()


def test_a_full_disk_is_told_and_the_run_stays_whole(
    tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second file finds no room, on a disk that is full. Neither a path nor the job is lost over it."""
    for name in ("model/model.safetensors", "run_status.json", "tb/server/events"):
        (run / name).write_text(name * 1000)
    before = files(run)

    def body(disk: SmallDisk) -> str:
        disk.fill(1 << 15)
        with caplog.at_level(logging.ERROR):
            end(tmp_path, run)
        assert (tmp_path / "server" / "job-1" / HOME).exists()
        return caplog.text

    said = on_small_disk(tmp_path / "server", body)
    assert "results not copied (Error); they are in the server's runs folder" in said
    assert str(tmp_path) not in said
    assert files(run) == before


def test_a_copy_that_is_there_already_is_left_alone(
    tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = end(tmp_path, run)
    (target / "run_status.json").write_text("first")
    with caplog.at_level(logging.ERROR):
        end(tmp_path, run)
    assert (target / "run_status.json").read_text() == "first"
    assert "results not copied (FileExistsError)" in caplog.text


@pytest.mark.parametrize("outcome", ["finished", "stopped"])
def test_a_job_brings_its_run_home_however_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """Stopped: two sites of three are silent in round 1; what round 0 brought is there, and no model."""
    silent = {("a", 1), ("b", 1)} if outcome == "stopped" else set()
    flare = MemoryFlare(tmp_path, monkeypatch, toy_experiment(), three_sites(),
                        lambda task: Fate(train=1e9) if (task.site, task.round) in silent else Fate())  # fmt: skip
    flare.submit([ResultsInJob()], task_timeout=20)
    home = tmp_path / "server" / "job-1" / HOME
    assert json.loads((home / "run_status.json").read_text())["status"] == outcome
    assert (home / "checkpoints" / "server.safetensors").read_bytes() == flare.run.checkpoint.read_bytes()
    brought = {path.name for path in (home / "checkpoints").iterdir()}
    assert brought == {"server.safetensors", "history.jsonl"}  # and none of the earlier rounds
    assert (home / "metrics.csv").exists()
    assert (home / "model" / "model.safetensors").exists() == (outcome == "finished")
