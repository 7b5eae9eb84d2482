"""One writer a run folder; the second is told who; the killed bar nobody."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.presets import SMALL

from fedvlp.federation.loop import Rounds
from fedvlp.run.folder import RunFolder
from fedvlp.run.lock import FILE, FolderInUseError, in_use, only_writer
from fedvlp.run.metrics import Record
from fedvlp.run.simulate import simulate

HOLD = """
import sys, time
from pathlib import Path
from fedvlp.run.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
TWO = replace(SMALL, data=replace(SMALL.data, sites=2, size=48), rounds=Rounds(rounds=2, evaluate_every=0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "fedavg" / "007"


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that has the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_told_who_and_since_when_and_a_killed_one_bars_nobody(folder: Path) -> None:
    process = holder(folder)
    try:
        with pytest.raises(FolderInUseError) as error, only_writer(folder):
            pass
        said = json.loads((folder / FILE).read_text())
        assert said["process"] == process.pid
        assert str(error.value) == (
            f"run fedavg/007 is in use: process {process.pid} on {socket.gethostname()} has been writing it since "
            f"{said['since']}; wait for it to end or end it, then try again"
        )
        process.kill()
        process.wait()
        assert (folder / FILE).exists(), "its file is still there"
        with only_writer(folder):
            assert json.loads((folder / FILE).read_text())["process"] == os.getpid()
    finally:
        process.kill()


def test_the_same_process_is_refused_as_well_and_may_come_again(folder: Path) -> None:
    with only_writer(folder), pytest.raises(FolderInUseError, match=f"process {os.getpid()} "), only_writer(folder):
        pass
    with only_writer(folder):
        pass


def test_an_error_lets_go(folder: Path) -> None:
    with pytest.raises(KeyError), only_writer(folder):
        raise KeyError
    with only_writer(folder):
        pass


def test_whoever_has_patience_waits_for_the_other_to_end(folder: Path) -> None:
    """As a job does whose predecessor's process has not noticed yet that its server is gone."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with only_writer(folder):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    threading.Timer(0.5, leave.set).start()
    with only_writer(folder, patience=30):
        assert leave.is_set()
    thread.join()


def _hold_and_fork(folder: Path, told: Connection) -> None:
    with only_writer(folder):
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        told.send(worker)
        time.sleep(60)


def test_a_worker_that_outlives_a_killed_engine_does_not_hold_the_lock(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    engine = context.Process(target=_hold_and_fork, args=(folder, theirs), daemon=True)
    engine.start()
    worker = ours.recv()
    try:
        with pytest.raises(FolderInUseError), only_writer(folder):
            pass
        engine.kill()
        engine.join()
        os.kill(worker, 0)  # is still there
        with only_writer(folder):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def _resume(folder: Path, told: Connection) -> None:
    """Goes on with the run, and waits after its first phase until it is told to go on."""

    def pause(record: Record) -> None:
        told.send(record["round"])
        told.recv()

    simulate(TWO, RunFolder(folder), workers=1, report=pause)


def test_of_two_resumes_at_once_one_wins_and_the_bytes_are_the_same(tmp_path: Path) -> None:
    plain = RunFolder.create(tmp_path / "plain", TWO)
    simulate(TWO, plain)
    stopped = RunFolder.create(tmp_path / "runs", TWO)
    simulate(replace(TWO, rounds=replace(TWO.rounds, rounds=1)), stopped)
    stopped.model.unlink()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    first = context.Process(target=_resume, args=(stopped.path, theirs), daemon=True)
    first.start()
    assert ours.recv() == 1
    before = {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file()}
    with pytest.raises(FolderInUseError, match=rf"^run small/001 is in use: process {first.pid} on "):
        simulate(TWO, stopped, workers=2)
    assert {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file()} == before
    ours.send("go on")
    first.join(60)
    assert first.exitcode == 0
    assert stopped.model.read_bytes() == plain.model.read_bytes()


@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a pipe"])
def test_a_lock_that_is_no_file_of_its_own_is_refused_and_cuts_nothing(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True)
    precious = folder.parent / "precious"
    if kind == "a pipe":
        os.mkfifo(folder / FILE)
    else:
        (folder / FILE).symlink_to(precious)
    if kind == "a link":
        precious.write_text("all of it")
    for _ in range(2):
        with pytest.raises(FolderInUseError, match="cannot be locked"), only_writer(folder):
            pass
        with pytest.raises(FolderInUseError, match="cannot be locked"):
            in_use(folder)
    assert (precious.read_text() if precious.exists() else "") == ("all of it" if kind == "a link" else "")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_disk_without_locks_is_named_with_what_to_do(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    refused = pytest.raises(FolderInUseError, match=rf"no file locks \({os.strerror(number)}\).*--runs FOLDER")
    with refused, only_writer(folder):
        pytest.fail("another process could write it as well")
    assert in_use(folder) == "", "a list of runs is shown all the same"
