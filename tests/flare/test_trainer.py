"""The simulator's trainer: a visit passes its task on, and whatever happens to the trainer, the site's answer comes.

The real simulator with a trainer that is killed is the slow test at the end; a run that nobody disturbs is in
tests/flare/test_simulator.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from support.flare_memory import Engine, on_toys, site_executor, toy_experiment, toy_world
from support.simulator import assert_same_metrics, simulator
from support.toy import Pairs, clone, same_bytes, small, three_sites

from fedvlp.core.site_error import UNTOLD
from fedvlp.core.types import Broadcast, FailureKind
from fedvlp.flare import messages, trainer_link
from fedvlp.flare import site_executor as site_executor_module
from fedvlp.flare.jobs import write_job
from fedvlp.flare.paths import SIMULATED
from fedvlp.flare.raw_tensors import RawTensor, raw
from fedvlp.flare.site_executor import SiteExecutor
from fedvlp.flare.trainer_link import (
    PROCESS,
    READY,
    SOCKET,
    Answer,
    TrainerLink,
    TrainerLostError,
    receive,
    send,
    started_at,
)
from fedvlp.methods import METHODS
from fedvlp.run import presets
from fedvlp.run.config import identity, override
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

LOCAL = toy_experiment(small(METHODS["local"]))
ONE = RawTensor("F32", (1,), b"\0\0\x80?")


# --- the link ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """A trainer's folder; the path of a socket has to be short."""
    with tempfile.TemporaryDirectory(prefix="t") as made:
        yield Path(made)


def link(folder: Path) -> TrainerLink:
    return TrainerLink(folder, os.getpid(), started_at(os.getpid()) or "")


def never() -> bool:
    return False


class Stub:
    """A trainer that does with one visit what it is told to."""

    def __init__(self, folder: Path, serve: Callable[[Connection], None]) -> None:
        self.listener = Listener(str(folder / SOCKET), "AF_UNIX")
        self.thread = threading.Thread(target=self._run, args=(serve,), daemon=True)
        self.thread.start()

    def _run(self, serve: Callable[[Connection], None]) -> None:
        with self.listener, self.listener.accept() as connection:
            connection.recv_bytes()
            connection.send_bytes(READY)
            serve(connection)


def test_an_answer_comes_as_it_was_said(folder: Path) -> None:
    asked: list[Any] = []

    def serve(connection: Connection) -> None:
        asked.append(receive(connection))
        send(connection, {"update": {"round": 3}, "behind": {"update": 7}, "aborted": False}, {"w": ONE})

    Stub(folder, serve)
    said = link(folder).ask({"paths": {}}, {"v": ONE}, never)
    assert (said.update, said.behind, said.failure, said.aborted) == ({"round": 3}, {"update": 7}, None, False)
    assert bytes(said.tensors["w"].data) == ONE.data
    ((content, tensors),) = asked
    assert content == {"paths": {}}
    assert bytes(tensors["v"].data) == ONE.data


@pytest.mark.parametrize("ends", ["before it reads", "after it has read", "in the middle of its answer"])
def test_a_trainer_that_ends_is_lost_and_not_an_answer(folder: Path, ends: str) -> None:
    def serve(connection: Connection) -> None:
        if ends != "before it reads":
            receive(connection)
        if ends == "in the middle of its answer":
            connection.send_bytes(b'{"aborted": false}')

    Stub(folder, serve)
    with pytest.raises(TrainerLostError, match="ended before it had answered"):
        link(folder).ask({}, {}, never)


def test_an_aborted_visit_leaves_and_the_trainer_sees_it(folder: Path) -> None:
    seen = threading.Event()

    def serve(connection: Connection) -> None:
        receive(connection)
        assert connection.poll(30)  # what _serve asks between two steps
        seen.set()

    Stub(folder, serve)
    assert link(folder).ask({}, {}, lambda: True).aborted
    assert seen.wait(30)


def test_a_trainer_that_is_busy_is_left_alone(folder: Path) -> None:
    with link(folder)._alone(), pytest.raises(TrainerLostError, match="works for another site"):
        link(folder).ask({}, {}, never)


@pytest.mark.parametrize("found", ["open to others", "a link", "a file"])
def test_a_folder_that_somebody_else_may_have_prepared_is_not_used(folder: Path, found: str) -> None:
    place = folder / "place"
    if found == "open to others":
        place.mkdir()
        place.chmod(0o755)
    elif found == "a link":
        (folder / "theirs").mkdir(mode=0o700)
        place.symlink_to(folder / "theirs")
    else:
        place.touch(0o700)
    with pytest.raises(TrainerLostError, match="this user's alone"):
        link(place).ask({}, {}, never)


def test_the_folder_is_made_for_this_user_alone(folder: Path) -> None:
    with link(folder / "place")._alone():
        assert (folder / "place").stat().st_mode & 0o777 == 0o700


def gone(process: int) -> bool:
    for _ in range(400):
        if started_at(process) is None:
            return True
        time.sleep(0.05)
    return False


def trainers(folder: Path) -> list[int]:
    """The processes of trainers whose folder is below ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"fedvlp.flare.trainer" in words and any(word.startswith(bytes(folder)) for word in words):
            found.append(int(entry.name))
    return found


def test_a_real_trainer_answers_two_visits_and_ends_with_its_simulator(folder: Path) -> None:
    """What it is asked is no task of any experiment, which is an answer too. Its folder goes with it."""
    place = folder / "place"
    parent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        asks = TrainerLink(place, parent.pid, started_at(parent.pid) or "")
        for _ in range(2):
            said = asks.ask({"message": {}, "settings": {}, "paths": {}}, {}, never)
            assert said.failure == (FailureKind.FAILED.value, "KeyError", UNTOLD)
            (process,) = trainers(folder)
        os.kill(process, signal.SIGKILL)
        assert gone(process)
        assert asks.ask({"message": {}, "settings": {}, "paths": {}}, {}, never).failure, "another one is started"
        (other,) = trainers(folder)
        assert other != process
    finally:
        parent.communicate()
    assert gone(other)
    assert not place.exists()


@pytest.fixture
def parent() -> Iterator[int]:
    """A process for which trainers may live."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


NOTHING = {"message": {}, "settings": {}, "paths": {}}
"""What a trainer answers at once: that it is no task."""


@pytest.mark.slow(seconds=8)
def test_a_trainer_makes_way_after_its_tasks_and_when_it_is_made_of_something_else(folder: Path, parent: int) -> None:
    asks = TrainerLink(folder / "place", parent, started_at(parent) or "", folder / "log")

    def asked(made_of: str) -> int:
        assert asks.ask(NOTHING, {}, never, made_of=made_of, tasks=3).failure
        return int((folder / "place" / PROCESS).read_text().split()[0])

    first = [asked("a") for _ in range(3)]
    assert len(set(first)) == 1
    fourth = asked("a")
    assert gone(first[0])
    other = asked("b")
    assert gone(fourth)
    assert len({first[0], fourth, other}) == 3
    assert asked("b") == other
    assert (folder / "log").exists()


@pytest.mark.slow(seconds=8)
def test_a_trainer_that_falls_silent_costs_one_task(folder: Path, parent: int) -> None:
    asks = TrainerLink(folder / "place", parent, started_at(parent) or "")
    assert asks.ask(NOTHING, {}, never, silence=60.0).failure
    stopped = int((folder / "place" / PROCESS).read_text().split()[0])

    def stop(content: Any) -> None:
        os.kill(stopped, signal.SIGSTOP)

    with pytest.MonkeyPatch.context() as patch:
        sends = trainer_link.send
        patch.setattr(trainer_link, "send", lambda *args: (stop(args), sends(*args)))
        with pytest.raises(TrainerLostError) as lost:
            asks.ask(NOTHING, {}, never, silence=5.0)
    assert lost.value.begun
    assert gone(stopped)
    assert asks.ask(NOTHING, {}, never, silence=60.0).failure


def test_a_clock_that_is_put_does_not_end_a_trainer(folder: Path) -> None:
    """Its signs of life seem an hour old when this machine's clock has been put forward; they still come."""
    stands_for_it = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (folder / PROCESS).write_text(f"{stands_for_it.pid} {started_at(stands_for_it.pid)}")

        def serve(connection: Connection) -> None:
            receive(connection)
            for second in range(15):
                os.utime(folder / PROCESS, (second, second))
                time.sleep(0.1)
            send(connection, {"aborted": False}, {})

        Stub(folder, serve)
        assert not link(folder).ask({}, {}, never, silence=1.0).aborted
        assert stands_for_it.poll() is None
    finally:
        stands_for_it.kill()
        stands_for_it.wait()


@pytest.mark.slow(seconds=8)
def test_a_trainer_that_hangs_in_a_task_of_nobody_is_replaced(folder: Path, parent: int) -> None:
    """Whoever had asked it was killed; the next task is not lost."""
    asks = TrainerLink(folder / "place", parent, started_at(parent) or "")
    assert asks.ask(NOTHING, {}, never).failure
    stopped = int((folder / "place" / PROCESS).read_text().split()[0])
    os.kill(stopped, signal.SIGSTOP)
    assert asks.ask(NOTHING, {}, never, silence=6.0).failure
    assert gone(stopped)


def test_a_socket_that_outlives_its_trainer_is_not_asked_again(folder: Path, parent: int) -> None:
    """The last thread of a killed trainer holds it open for a moment, and takes whoever connects down with it."""
    asks = TrainerLink(folder / "place", parent, started_at(parent) or "")
    (folder / "place").mkdir(mode=0o700)

    def hang_up(listener: Listener) -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept().close()

    with Listener(str(folder / "place" / SOCKET), "AF_UNIX") as outlives:
        threading.Thread(target=hang_up, args=(outlives,), daemon=True).start()
        assert asks.ask(NOTHING, {}, never).failure


def test_a_simulator_without_a_number_of_its_own_has_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not say when a process started, a new one could pass for it."""
    assert trainer_link.of_simulator(os.getppid()) is not None
    monkeypatch.setattr(trainer_link, "started_at", lambda process: None)
    assert trainer_link.of_simulator(os.getppid()) is None


# --- the executor ------------------------------------------------------------------------------------------------


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> dict[str, Pairs]:
    found = three_sites()
    on_toys(monkeypatch, found)
    return found


@pytest.fixture
def fl_ctx(tmp_path: Path) -> FLContext:
    return Engine("a", tmp_path / "workspace" / "a", SIMULATED).new_context()


class Fake:
    """A link that answers, or has lost its trainer."""

    def __init__(self, answer: Answer | None) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    def ask(self, content: dict[str, Any], tensors: dict[str, RawTensor], should_stop: Any) -> Answer:
        self.asked.append(content)
        if self.answer is None:
            raise TrainerLostError("it was killed")
        return self.answer


def visiting(answer: Answer | None) -> tuple[SiteExecutor, Fake]:
    """An executor in a visit of the simulator; toys have no settings as JSON, so it is given its experiment."""
    executor, fake = SiteExecutor(settings={"name": "toy"}), Fake(answer)
    executor._experiment, executor._trainer = LOCAL, fake  # type: ignore[assignment]
    return executor, fake


def task(data: dict[str, Pairs], held: bool) -> Shareable:
    run = identity(LOCAL, "toy/001")
    sent = messages.send_broadcast(Broadcast(0, "train", clone(toy_world(LOCAL, data).server().state)), run)
    if held:  # as the serialiser of a visit brings it
        sent["DXO"]["data"] = {name: raw(tensor) for name, tensor in sent["DXO"]["data"].items()}
    return sent


def test_without_its_trainer_a_visit_answers_with_the_same_bytes(
    data: dict[str, Pairs], fl_ctx: FLContext, tmp_path: Path
) -> None:
    executor, fake = visiting(None)
    reply = executor.execute("train", task(data, True), fl_ctx, Signal())
    other = Engine("a", tmp_path / "other" / "a", "job-1").new_context()
    expected = site_executor(LOCAL).execute("train", task(data, False), other, Signal())
    same_bytes(messages.receive_update(reply, "a").state, messages.receive_update(expected, "a").state)
    memories = [next((tmp_path / folder).rglob("00000-0.safetensors")) for folder in ("runs", "other")]
    assert memories[0].read_bytes() == memories[1].read_bytes()
    again = executor.execute("train", task(data, True), fl_ctx, Signal())
    same_bytes(messages.receive_update(again, "a").state, messages.receive_update(expected, "a").state)
    assert len(fake.asked) == 1, "it has all it needs from now on"


def test_what_the_trainer_says_is_the_sites_reply(data: dict[str, Pairs], fl_ctx: FLContext) -> None:
    expected = site_executor(LOCAL).execute("train", task(data, False), fl_ctx, Signal())
    update = messages.receive_update(expected, "a")
    meta = dict(expected["DXO"]["meta"][messages.KEY])
    executor, fake = visiting(Answer(meta, {name: raw(tensor) for name, tensor in update.state.items()}))
    reply = executor.execute("train", task(data, True), fl_ctx, Signal())
    assert messages.receive_figures(reply, "a").metrics == update.metrics
    assert {name: value.shape for name, value in reply["DXO"]["data"].items()} == {
        name: tuple(tensor.shape) for name, tensor in update.state.items()
    }
    ((asked),) = fake.asked
    assert asked["message"]["run"]["folder"] == "toy/001"
    assert asked["paths"]["site"] == "a"
    assert fl_ctx.get_prop(messages.BEHIND) is None


def test_a_failure_and_an_abort_of_the_trainer_are_the_sites(data: dict[str, Pairs], fl_ctx: FLContext) -> None:
    executor, _ = visiting(Answer(failure=("not held", "ValueError: Jane Doe", "PrivacyError: no")))
    failed = messages.failure(executor.execute("train", task(data, True), fl_ctx, Signal()))
    assert failed is not None
    assert failed.kind is FailureKind.NOT_HELD
    assert failed.text == "PrivacyError: no"
    executor, _ = visiting(Answer(aborted=True))
    reply = executor.execute("train", task(data, True), fl_ctx, Signal())
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED


@pytest.mark.parametrize(
    ("job", "policy", "passes_on"), [(SIMULATED, False, True), (SIMULATED, True, False), ("0f3a", False, False)]
)
def test_only_a_visit_of_the_simulator_without_filters_of_its_own_passes_its_task_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, policy: bool, passes_on: bool
) -> None:
    """Never at a real site: neither a trainer nor the serialiser that hands on bytes."""
    registered: list[Any] = []
    monkeypatch.setattr(site_executor_module.messages, "register", registered.append)
    (tmp_path / "local").mkdir()
    if policy:
        (tmp_path / "local" / "privacy.json").touch()
    executor = SiteExecutor(settings={"name": "toy"})
    assert registered == [], "not before it is known"
    executor.handle_event(EventType.START_RUN, Engine("a", tmp_path, job).new_context())
    assert (executor._trainer is not None) == passes_on
    assert [decomposer is not None for decomposer in registered] == [passes_on]


def test_an_executor_that_is_given_classes_has_no_trainer(tmp_path: Path) -> None:
    executor = site_executor(LOCAL)
    executor.handle_event(EventType.START_RUN, Engine("a", tmp_path, SIMULATED).new_context())
    assert executor._trainer is None


def test_settings_are_the_experiment() -> None:
    from fedvlp.run.config import to_config

    settings = to_config(presets.get("feddra"))["args"]
    assert SiteExecutor(settings=settings).experiment == presets.get("feddra")


# --- the simulator -----------------------------------------------------------------------------------------------


class Killer(threading.Thread):
    """Kills the trainer below ``folder`` each time that ``when`` holds, and counts."""

    def __init__(self, folder: Path, when: list[Callable[[], bool]]) -> None:
        super().__init__(daemon=True)
        self.folder, self.when, self.killed = folder, when, 0

    def run(self) -> None:
        while self.when:
            if self.when[0]():
                for process in trainers(self.folder):
                    os.kill(process, signal.SIGKILL)
                    self.killed += 1
                    self.when.pop(0)
                    break
            time.sleep(0.05)


@pytest.mark.slow(seconds=90)
def test_a_trainer_that_is_killed_changes_no_byte_and_none_is_left(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in its first task, and once after a site has answered with its help: between two tasks, or in the next."""
    experiment = presets.get("feddra")
    settings = {
        "data.size": 300, "data.sites": 2, "rounds.rounds": 1, "method.local_steps": 2, "method.align_steps": 2,
        "training.batch_size": 8, "method.dro_batch": 8,
    }  # fmt: skip
    for key, value in settings.items():
        experiment = override(experiment, key, str(value))
    engine = RunFolder.create(tmp_path / "engine", experiment)
    simulate(experiment, engine)
    place = tmp_path / "runs" / "feddra" / "001"

    def after_the_first_phase() -> bool:
        return (place / "checkpoints").is_dir() and any((place / "checkpoints").iterdir())

    killer = Killer(folder, [lambda: True, after_the_first_phase])
    killer.start()
    done = simulator(write_job(experiment, tmp_path / "job"), tmp_path, 1, TMPDIR=str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert killer.killed == 2
    assert "answers in this process" in done.stdout
    flare = RunFolder(place)
    assert flare.model.read_bytes() == engine.model.read_bytes()
    assert_same_metrics(flare, engine)
    for process in trainers(folder):
        assert gone(process), "a trainer outlives its simulator"
