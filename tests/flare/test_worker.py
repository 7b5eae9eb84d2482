"""The worker that stays: a process of FLARE's hands its task on, and whatever happens to the worker, an answer comes.

The real simulator with a worker that is killed is the slow test at the end; a run that nobody disturbs is in
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
from dataclasses import replace
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
from support.toy import Pairs, clone, small, three_sites

from fedvlp.core.site_error import UNTOLD
from fedvlp.core.types import Broadcast, FailureKind
from fedvlp.flare import child_protocol, messages, relay, worker
from fedvlp.flare import site_executor as site_executor_module
from fedvlp.flare.jobs import write_job
from fedvlp.flare.paths import SIMULATED
from fedvlp.flare.relay import Held
from fedvlp.flare.site_executor import SiteExecutor
from fedvlp.flare.tensor_stream import from_files, to_files
from fedvlp.flare.worker import PROCESS, SOCKET, Worker, WorkerLostError, received, send, started_at, worker_of
from fedvlp.methods import METHODS
from fedvlp.run import presets
from fedvlp.run.config import identity, override
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

LOCAL = toy_experiment(small(METHODS["local"]))


# --- asking ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of workers; the path of a socket has to be short."""
    with tempfile.TemporaryDirectory(prefix="t") as made:
        (Path(made) / "0").mkdir()
        yield Path(made)


def never() -> bool:
    return False


class Stub:
    """A worker that does with one task what it is told to."""

    def __init__(self, folder: Path, serve: Callable[[Connection], None]) -> None:
        self.listener = Listener(str(folder / "0" / SOCKET), "AF_UNIX")
        self.thread = threading.Thread(target=self._run, args=(serve,), daemon=True)
        self.thread.start()

    def _run(self, serve: Callable[[Connection], None]) -> None:
        with self.listener, self.listener.accept() as connection:
            connection.recv_bytes()
            connection.send_bytes(b"ready")
            serve(connection)


def test_an_answer_comes_as_it_was_said(folder: Path) -> None:
    asked: list[Any] = []

    def serve(connection: Connection) -> None:
        asked.append(received(connection, connection.recv_bytes()))
        for _ in range(3):
            connection.send_bytes(b"")  # signs of life
        send(connection, {"update": {"round": 3}}, {"w": [b"1", b"2"]})

    Stub(folder, serve)
    said = Worker(str(folder), os.getpid()).ask({"paths": {}}, {"v": [b"0"], "none": []}, never)
    assert said == ({"update": {"round": 3}}, {"w": [b"1", b"2"]})
    assert asked == [({"paths": {}}, {"v": [b"0"], "none": []})]


@pytest.mark.parametrize("ends", ["before it reads", "after it has read", "in the middle of its answer"])
def test_a_worker_that_ends_is_lost_and_not_an_answer(folder: Path, ends: str) -> None:
    def serve(connection: Connection) -> None:
        if ends != "before it reads":
            received(connection, connection.recv_bytes())
        if ends == "in the middle of its answer":
            connection.send_bytes(b'[{"update": {}}, {"w": 1}]')

    Stub(folder, serve)
    with pytest.raises(WorkerLostError, match="no worker answered"):
        Worker(str(folder), os.getpid()).ask({}, {}, never)


def test_who_is_asked_to_stop_leaves_and_the_worker_sees_it(folder: Path) -> None:
    seen = threading.Event()

    def serve(connection: Connection) -> None:
        received(connection, connection.recv_bytes())
        assert connection.poll(30)
        seen.set()

    Stub(folder, serve)
    assert Worker(str(folder), os.getpid()).ask({}, {}, lambda: True) is None
    assert seen.wait(30)


def test_tasks_at_the_same_time_have_a_worker_each(folder: Path) -> None:
    asks = Worker(str(folder), os.getpid())
    with asks._free() as first, asks._free() as second:
        assert first != second
    with asks._free() as again:
        assert again == first


@pytest.mark.parametrize("found", ["nothing", "open to others", "a link", "a file"])
def test_a_folder_that_somebody_else_may_have_prepared_is_not_used(
    folder: Path, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.tempfile, "gettempdir", lambda: str(folder))
    made = worker_of(os.getpid(), "job")
    assert made is not None
    place = Path(made.folder)
    assert place.stat().st_mode & 0o777 == 0o700
    place.rmdir()
    if found == "open to others":
        place.mkdir()
        place.chmod(0o755)
    elif found == "a link":
        (folder / "theirs").mkdir(mode=0o700)
        place.symlink_to(folder / "theirs")
    elif found == "a file":
        place.touch(0o700)
    assert (worker_of(os.getpid(), "job") is None) == (found != "nothing")


def test_a_process_without_a_start_has_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not say when a process started, a new one could pass for it."""
    monkeypatch.setattr(worker, "started_at", lambda process: None)
    assert worker_of(os.getpid(), "") is None


def gone(process: int) -> bool:
    for _ in range(400):
        if started_at(process) is None:
            return True
        time.sleep(0.05)
    return False


def workers(folder: Path) -> list[int]:
    """The processes of workers whose folder is below ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"fedvlp.flare.worker" in words and any(word.startswith(bytes(folder)) for word in words):
            found.append(int(entry.name))
    return found


@pytest.fixture
def parent() -> Iterator[int]:
    """A process for which workers may live."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


def failed(asks: Worker) -> bool:
    """Whether the worker answers: that what it is asked is no task of any experiment."""
    return asks.ask({}, {}, never) == ({"failure": [FailureKind.FAILED.value, "KeyError", UNTOLD]}, {})


def number(folder: Path) -> int:
    return int((folder / "0" / PROCESS).read_text().split()[0])


def test_a_real_worker_answers_two_tasks_and_ends_with_its_parent(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        asks = Worker(str(folder / "0"), parent.pid)
        for _ in range(2):
            assert failed(asks)
            (process,) = workers(folder)
        os.kill(process, signal.SIGKILL)
        assert gone(process)
        assert failed(asks), "another one is started"
        (other,) = workers(folder)
        assert other != process
    finally:
        parent.communicate()
    assert gone(other)
    assert not (folder / "0").exists()


@pytest.mark.slow(seconds=8)
def test_a_worker_makes_way_after_its_tasks_and_when_it_is_made_of_something_else(folder: Path, parent: int) -> None:
    asks = Worker(str(folder), parent, str(folder / "log"), tasks=3)

    def asked(made_of: str) -> int:
        assert failed(replace(asks, made_of=made_of))
        return number(folder)

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
def test_a_worker_that_falls_silent_costs_one_task(folder: Path, parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = Worker(str(folder), parent)
    assert failed(asks)
    stopped, sends = number(folder), worker.send

    def stop(*message: Any) -> None:
        os.kill(stopped, signal.SIGSTOP)
        sends(*message)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "send", stop)
        with pytest.raises(WorkerLostError):
            replace(asks, silence=5.0).ask({}, {}, never)
    assert gone(stopped)
    assert failed(asks)


@pytest.mark.slow(seconds=8)
def test_a_worker_that_hangs_between_tasks_is_replaced(
    folder: Path, parent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = Worker(str(folder), parent)
    assert failed(asks)
    stopped = number(folder)
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr(worker, "STARTS", 6.0)
    assert failed(asks)
    assert gone(stopped)


def test_a_worker_whose_task_nobody_waits_for_ends(folder: Path, parent: int) -> None:
    """Its signs of life find nobody."""
    code = "import sys, time; from fedvlp.flare import worker; worker.Tasks.answer = lambda *a: time.sleep(60);"
    code += f"from pathlib import Path; worker.main(Path({str(folder / '0')!r}), {parent}, '', 0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Worker(str(folder), parent).ask({}, {}, lambda: True) is None
    assert gone(number(folder))


def test_a_socket_that_outlives_its_worker_is_not_asked_again(folder: Path, parent: int) -> None:
    """The last thread of a killed worker holds it open for a moment, and takes whoever connects down with it."""

    def hang_up(listener: Listener) -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept().close()

    with Listener(str(folder / "0" / SOCKET), "AF_UNIX") as outlives:
        threading.Thread(target=hang_up, args=(outlives,), daemon=True).start()
        assert failed(Worker(str(folder), parent))


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
    """Workers that answer, or are lost, one a task."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def ask(self, content: dict[str, Any], files: worker.Files, should_stop: Any) -> Any:
        self.asked.append(content)
        answer = self.answers.pop(0)
        if isinstance(answer, WorkerLostError):
            raise answer
        return answer


def answered(data: dict[str, Pairs], fl_ctx: FLContext, *answers: Any) -> tuple[Shareable, Fake]:
    """What an executor replies whose workers give these answers."""
    executor, fake = SiteExecutor(settings={"name": "toy"}), Fake(*answers)
    executor._worker = fake  # type: ignore[assignment]
    return executor.execute("train", task(data, held=True), fl_ctx, Signal()), fake


def task(data: dict[str, Pairs], held: bool) -> Shareable:
    run = identity(LOCAL, "toy/001")
    sent = messages.send_broadcast(Broadcast(0, "train", clone(toy_world(LOCAL, data).server().state)), run)
    if held:  # as the serialiser brings it
        sent["DXO"]["data"] = {name: Held(to_files(tensor)) for name, tensor in sent["DXO"]["data"].items()}
    return sent


@pytest.mark.parametrize("lost", [(), (WorkerLostError("killed"),)], ids=["at once", "after one that was lost"])
def test_what_a_worker_says_is_the_sites_reply(data: dict[str, Pairs], fl_ctx: FLContext, lost: Any) -> None:
    expected = site_executor(LOCAL).execute("train", task(data, False), fl_ctx, Signal())
    header, state = child_protocol.apart(expected)
    said = {"update": header, "behind": None}, {name: to_files(tensor) for name, tensor in state.items()}
    reply, fake = answered(data, fl_ctx, *lost, said)
    assert messages.receive_figures(reply, "a").metrics == messages.receive_update(expected, "a").metrics
    for name, tensor in state.items():
        assert from_files(reply["DXO"]["data"][name].files).equal(tensor)
    assert messages.COUNTED not in reply["DXO"]["meta"]
    asked = fake.asked[-1]
    assert asked["message"]["run"]["folder"] == "toy/001"
    assert asked["paths"]["site"] == "a"


def test_a_failure_an_abort_and_two_lost_workers_are_the_sites(data: dict[str, Pairs], fl_ctx: FLContext) -> None:
    said: Any = {"failure": ["unreadable", "ValueError: Jane Doe", "PrivacyError: no"]}, {}
    failed = messages.failure(answered(data, fl_ctx, said)[0])
    assert failed is not None
    assert (failed.kind, failed.text) == (FailureKind.UNREADABLE, "PrivacyError: no")
    assert answered(data, fl_ctx, None)[0].get_return_code() == ReturnCode.TASK_ABORTED
    failed = messages.failure(answered(data, fl_ctx, WorkerLostError("1"), WorkerLostError("2"))[0])
    assert failed is not None
    assert (failed.kind, failed.text) == (FailureKind.LOST, messages.CHILD_LOST)


@pytest.mark.parametrize(
    ("job", "policy", "hands_on"), [(SIMULATED, False, True), (SIMULATED, True, False), ("0f3a", False, False)]
)
def test_only_a_process_of_the_simulator_without_filters_of_its_own_hands_its_task_on(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, job: str, policy: bool, hands_on: bool
) -> None:
    """Never at a real site: neither a worker nor the serialiser that hands on bytes."""
    registered: list[Any] = []
    monkeypatch.setattr(site_executor_module.messages, "register", lambda *decomposer: registered.extend([decomposer]))
    monkeypatch.setattr(worker.tempfile, "gettempdir", lambda: str(folder))
    (tmp_path / "local").mkdir()
    if policy:
        (tmp_path / "local" / "privacy.json").touch()
    executor = SiteExecutor(settings={"name": "toy"})
    assert registered == [], "not before it is known"
    executor.handle_event(EventType.START_RUN, Engine("a", tmp_path, job).new_context())
    assert (executor._worker is not None) == hands_on
    ((*decomposer,),) = registered
    assert [type(one) for one in decomposer] == [relay.HeldDecomposer] * hands_on


def test_an_executor_that_is_given_classes_has_no_worker(tmp_path: Path) -> None:
    executor = site_executor(LOCAL)
    executor.handle_event(EventType.START_RUN, Engine("a", tmp_path, SIMULATED).new_context())
    assert executor._worker is None


def test_settings_are_the_experiment() -> None:
    from fedvlp.run.config import to_config

    settings = to_config(presets.get("feddra"))["args"]
    assert SiteExecutor(settings=settings).experiment == presets.get("feddra")


# --- the simulator -----------------------------------------------------------------------------------------------


class Killer(threading.Thread):
    """Kills the worker below ``folder`` each time that ``when`` holds, and counts."""

    def __init__(self, folder: Path, when: list[Callable[[], bool]]) -> None:
        super().__init__(daemon=True)
        self.folder, self.when, self.killed = folder, when, 0

    def run(self) -> None:
        while self.when:
            if self.when[0]():
                for process in workers(self.folder):
                    os.kill(process, signal.SIGKILL)
                    self.killed += 1
                    self.when.pop(0)
                    break
            time.sleep(0.05)


@pytest.mark.slow(seconds=90)
def test_a_worker_that_is_killed_changes_no_byte_and_none_is_left(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in its first task, and once after a phase: between two tasks, or in the next."""
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
    assert "given to another worker" in done.stdout
    flare = RunFolder(place)
    assert flare.model.read_bytes() == engine.model.read_bytes()
    assert_same_metrics(flare, engine)
    for process in workers(folder):
        assert gone(process), "a worker outlives its simulator"
