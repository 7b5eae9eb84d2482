"""A site's doors: what it answers, what it refuses, in which words it fails, and what its training child does."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.f3.cellnet.defs import CellChannel
from support.flare_memory import Engine, on_toys, site_executor, toy_experiment, toy_world
from support.toy import Pairs, clone, same_bytes, small, three_sites

from fedvlp import __version__
from fedvlp.core.site_error import NotFiniteError
from fedvlp.core.types import WIRE_VERSION, Broadcast, Failure, FailureKind, Reply, Update
from fedvlp.deploy.envelope import EnvelopeError
from fedvlp.federation import site as site_module
from fedvlp.flare import child, child_protocol, messages, task_handler
from fedvlp.flare.executor import ChildExecutor, command
from fedvlp.flare.messages import MOST_SAMPLES
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.task_handler import RefusedError, TaskHandler
from fedvlp.methods import METHODS
from fedvlp.run.config import fingerprint, identity
from fedvlp.run.experiment import Experiment
from fedvlp.run.lock import in_use, only_writer

LOCAL = toy_experiment(small(METHODS["local"]))
FEDAVG = toy_experiment()


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> dict[str, Pairs]:
    """The records of toy sites; whatever is put together from now on is a toy."""
    data = three_sites()
    on_toys(monkeypatch, data)
    return data


@pytest.fixture
def fl_ctx(tmp_path: Path) -> FLContext:
    """The context of a task at site a."""
    return Engine("a", tmp_path / "a", "job-1").new_context()


def said_of(experiment: Experiment, folder: str = "toy/001") -> dict[str, str]:
    """What the server says of its run."""
    return identity(experiment, folder)


def message(data: dict[str, Pairs], experiment: Experiment = FEDAVG, phase: str = "train", round: int = 0) -> Broadcast:
    return Broadcast(round, phase, clone(toy_world(experiment, data).server().state))


def task(data: dict[str, Pairs], experiment: Experiment = FEDAVG, **run: str) -> Shareable:
    return messages.send_broadcast(message(data, experiment), said_of(experiment) | run)


def arguments(experiment: Experiment) -> dict[str, Any]:
    return {f.name: getattr(experiment, f.name) for f in fields(experiment)}


# --- in the job's own process ------------------------------------------------------------------------------------


def test_a_task_is_answered_with_the_sites_update(data: dict[str, Pairs], fl_ctx: FLContext, tmp_path: Path) -> None:
    reply = site_executor(LOCAL).execute("train", task(data, LOCAL), fl_ctx, Signal())
    world = toy_world(LOCAL, data, tmp_path / "plain")
    expected = world.site("a").handle(message(data, LOCAL))
    update = messages.receive_update(reply, "a")
    assert (update.round, update.phase, update.num_samples) == (0, "train", 8)
    assert update.metrics.keys() == expected.metrics.keys()
    assert update.metrics["loss/contrastive"] == expected.metrics["loss/contrastive"]
    memory = Path("sites") / "a" / "00000-0.safetensors"
    theirs = tmp_path / "a" / "runs" / "toy" / "001" / memory
    assert theirs.read_bytes() == (tmp_path / "plain" / memory).read_bytes()


def broken(error: Exception) -> Callable[[], None]:
    def tick() -> None:
        raise error

    return tick


@pytest.mark.parametrize(
    ("error", "logged", "said"),
    [
        (
            FileNotFoundError(2, "No such file", "/data/DOE^JANE"),
            "FileNotFoundError",
            "an error: the log of the",
        ),
        (ValueError("Jane Doe"), "ValueError", "an error: the log of the site says why"),
        (
            NotFiniteError("st-anna: loss is nan"),
            "NotFiniteError: st-anna: loss is",
            "NotFiniteError: the log",
        ),
        (
            MemoryError(),
            "MemoryError: this site's memory is too small",
            "MemoryError: this site's memory is too small; low",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_an_error_reply_in_words_of_the_list_only(
    data: dict[str, Pairs],
    fl_ctx: FLContext,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    logged: str,
    said: str,
) -> None:
    data["a"].tick = broken(error)
    executor = site_executor(FEDAVG)
    with caplog.at_level(logging.ERROR):
        reply = executor.execute("train", task(data), fl_ctx, Signal())
    failed = messages.failure(reply)
    assert failed is not None
    assert failed.kind is FailureKind.FAILED
    assert failed.text.startswith(said)
    assert "anna" not in failed.text
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert f"train failed: {logged}" in caplog.text
    assert "DOE" not in caplog.text
    assert "Jane" not in caplog.text
    data["a"].tick = lambda: None
    assert messages.failure(executor.execute("train", task(data), fl_ctx, Signal())) is None, (
        "the next task is answered"
    )


def test_an_aborted_task_says_so_and_leaves_nothing(data: dict[str, Pairs], fl_ctx: FLContext, tmp_path: Path) -> None:
    abort = Signal()
    data["a"].tick = lambda: abort.trigger(True)  # with the first batch
    reply = site_executor(LOCAL).execute("train", task(data, LOCAL), fl_ctx, abort)
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED
    assert not list((tmp_path / "a").rglob("*.safetensors"))


def test_the_task_of_another_experiment_or_version_is_refused(
    data: dict[str, Pairs], fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_handler, "Assembly", None)  # nothing may be built
    mine = fingerprint(FEDAVG)
    sentence = f"the server's fingerprint is not this site's, {mine}: server and site must run the same job"
    assert refused(data, fl_ctx, fingerprint="another") == sentence
    mine = f"this site reads 1 to {WIRE_VERSION} (fedvlp {__version__}): install one fedvlp at both"
    for number in (0, WIRE_VERSION + 1):
        sentence = f"the server writes wire version {number} (fedvlp 0.2.0), {mine}"
        assert refused(data, fl_ctx, wire=str(number), version="0.2.0") == sentence
    for other in ("another", "", None, ["1"]):
        assert refused(data, fl_ctx, wire=other) == f"the server writes another wire version, {mine}"


def refused(data: dict[str, Pairs], fl_ctx: FLContext, **run: Any) -> str:
    """Why the site refuses a task that says this of its run."""
    said = messages.failure(site_executor(FEDAVG).execute("train", task(data, **run), fl_ctx, Signal()))
    assert said is not None
    return said.text.removeprefix("RefusedError: ")


def test_another_fedvlp_of_one_wire_version_is_answered(data: dict[str, Pairs], fl_ctx: FLContext) -> None:
    """A site at 0.1.1 takes part in the run of a server at 0.1.0."""
    reply = site_executor(FEDAVG).execute("train", task(data, version="9.9.9"), fl_ctx, Signal())
    assert messages.failure(reply) is None


def test_a_task_that_is_no_message_of_fedvlp_is_an_error_reply(fl_ctx: FLContext) -> None:
    for stranger in (Shareable(), DXO(DataKind.WEIGHTS, data={"w": torch.ones(1)}).to_shareable()):
        reply = site_executor(FEDAVG).execute("train", stranger, fl_ctx, Signal())
        assert messages.failure(reply)
        assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION


def test_a_site_is_built_once_a_run_and_anew_for_the_next(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run must not resume it with the memory of the first: its folder is another."""
    built: list[Path | None] = []
    make = task_handler.Assembly

    def assembly(experiment: Experiment, folder: Path | None = None, accept_phi_risk: bool = False) -> Any:
        built.append(folder)
        return make(experiment, folder, accept_phi_risk)

    monkeypatch.setattr(task_handler, "Assembly", assembly)
    own = TaskHandler(LOCAL, SitePaths("a", str(tmp_path / "runs"), str(tmp_path / "local")))
    for folder in ("toy/001", "toy/001", "toy/002"):
        own.answer(message(data, LOCAL), said_of(LOCAL, folder), lambda: False)
    assert built == [tmp_path / "runs" / "toy" / "001", tmp_path / "runs" / "toy" / "002"]


def test_a_process_of_the_job_before_is_waited_for(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A straggler wrote its round 5 after the next job's process had written round 6, which was forgotten then."""
    own = TaskHandler(LOCAL, SitePaths("a", str(tmp_path / "runs"), str(tmp_path / "local")))
    memory = tmp_path / "runs" / "toy" / "001" / "sites" / "a"

    def answered() -> Update:
        return own.answer(message(data, LOCAL), said_of(LOCAL, "toy/001"), lambda: False)

    monkeypatch.setattr(task_handler, "LAST_ONE_ENDS", 0.0)
    straggler = only_writer(memory)
    with straggler, pytest.raises(RefusedError, match=r"^another process at a still works on this run after 0 s"):
        answered()
    assert {file.name for file in memory.iterdir()} == {"writer.lock"}
    monkeypatch.setattr(task_handler, "LAST_ONE_ENDS", 30.0)
    straggler = only_writer(memory)
    straggler.__enter__()
    threading.Timer(0.3, straggler.__exit__, (None, None, None)).start()
    assert answered().site == "a"
    assert not in_use(memory), "between tasks another process may answer for the site"
    with pytest.MonkeyPatch.context() as second:
        second.setattr(task_handler.distributed, "rank", lambda: 1)
        with only_writer(memory):  # as rank 0 of the same task does
            assert answered().site == "a"


def test_the_sites_own_settings_decide_about_its_data(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``local/fedvlp.json`` says that the risk of identifiers in reports is accepted; without the file it is not."""
    accepted = []
    make = task_handler.Assembly

    def assembly(experiment: Experiment, folder: Path | None = None, accept_phi_risk: bool = False) -> Any:
        accepted.append(accept_phi_risk)
        return make(experiment, folder, accept_phi_risk)

    monkeypatch.setattr(task_handler, "Assembly", assembly)
    for number, content in enumerate((None, {"accept_phi_risk": True}, {"accept_phi_risk": False})):
        local = tmp_path / str(number) / "local"
        local.mkdir(parents=True)
        if content is not None:
            (local / "fedvlp.json").write_text(json.dumps(content))
        TaskHandler(FEDAVG, SitePaths("a", str(tmp_path), str(local))).answer(
            message(data), said_of(FEDAVG), lambda: False
        )
    assert accepted == [False, True, False]


# --- the child's parent ------------------------------------------------------------------------------------------


def test_one_process_is_python_and_several_are_torchrun() -> None:
    assert command(1) == [sys.executable, "-u", "-m", "fedvlp.flare.child"]
    assert command(4) == [
        sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
        "-m", "fedvlp.flare.child",
    ]  # fmt: skip
    assert command(1, stays=True) == [sys.executable, "-u", "-m", "fedvlp.flare.relay"]
    assert command(4, stays=True) == command(4), "several processes train together, and end together"


def child_executor(**options: Any) -> ChildExecutor:
    return ChildExecutor(**options, **arguments(FEDAVG))


def test_every_task_has_a_child_of_its_own_and_limits_that_end_it() -> None:
    made = child_executor(task_timeout=77.0, silence=9.0, processes=2)
    assert (made._execution_mode, made._launch_once) == ("external_process", False)
    assert (made._heartbeat_timeout, made._task_wait_timeout, made._result_wait_timeout) == (9.0, 77.0, 77.0)
    assert made._command == command(2)
    assert child_executor(task_timeout=770.0)._task_wait_timeout == 300.0, "FLARE hears no sign of life meanwhile"
    assert made._requires_materialized_result("train", FLContext()), "the site's filters see the tensors"


def test_a_child_that_does_not_take_its_task_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By FLARE's own backend, made by the executor: the child is alive, and never answers."""
    made = child_executor(delivery=0.3)
    backend = made._create_backend()

    class Cell:
        def send_request(self, abort_signal: Signal, **_: Any) -> None:
            end = time.monotonic() + 20
            while not abort_signal.triggered and time.monotonic() < end:
                time.sleep(0.01)

    backend._context, backend._cell = made._build_backend_context(), Cell()
    monkeypatch.setattr(backend, "_process_group_alive", lambda trainer: True)
    status, said = backend._send_task_ready(SimpleNamespace(trainer_fqcn="site-1.child"), {}, Signal())
    assert (status, said) == ("session_dead", "TASK_READY timed out after 0.3s")


class CellEngine(Engine):
    """An engine with a cell, whose tasks FLARE would let the child fetch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks = (CellChannel.SERVER_COMMAND, ServerCommandNames.GET_TASK)
        self.cell = SimpleNamespace(decode_pass_through_topics={tasks, ("other", "topic")})

    def get_cell(self) -> Any:
        return self.cell


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The events that reach FLARE's executor, with the command at that moment."""
    seen: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        ClientAPIExecutor, "handle_event", lambda self, event, fl_ctx: seen.append((event, self._command))
    )
    return seen


@pytest.mark.parametrize(("content", "expected"), [(None, 2), ({}, 2), ({"processes": 3}, 3), ("not JSON", 2)])
def test_the_site_says_how_many_processes_train(
    tmp_path: Path, inherited: list[tuple[str, Any]], content: Any, expected: int
) -> None:
    """Before FLARE starts a child; a file that cannot be read leaves the job's number (the task then says why)."""
    (tmp_path / "local").mkdir()
    if content is not None:
        (tmp_path / "local" / "fedvlp.json").write_text(content if isinstance(content, str) else json.dumps(content))
    engine = CellEngine("a", tmp_path, "job-1")
    made = child_executor(processes=2)
    made.handle_event(EventType.START_RUN, engine.new_context())
    assert inherited == [(EventType.START_RUN, command(expected))]
    assert engine.cell.decode_pass_through_topics == {("other", "topic")}, "this process, not the child, holds tasks"


def test_other_events_are_flares(tmp_path: Path, inherited: list[tuple[str, Any]]) -> None:
    engine = CellEngine("a", tmp_path, "job-1")
    child_executor().handle_event(EventType.END_RUN, engine.new_context())
    assert inherited == [(EventType.END_RUN, command(1, stays=True))]
    assert len(engine.cell.decode_pass_through_topics) == 2


def in_child(monkeypatch: pytest.MonkeyPatch, reply: Callable[[Shareable], Shareable]) -> None:
    """FLARE's part: hands the task to a child and brings what it says."""
    monkeypatch.setattr(ClientAPIExecutor, "execute", lambda self, name, shareable, fl_ctx, abort: reply(shareable))


def test_the_childs_update_is_the_sites_reply(
    data: dict[str, Pairs], fl_ctx: FLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is given the site's own experiment and place; what it told its parent stays there."""
    given = []

    def child(shareable: Shareable) -> Shareable:
        given.append(child_protocol.in_child(FLModelUtils.from_shareable(shareable)))
        received, run, experiment, place, _ = given[-1]
        update = TaskHandler(experiment, place).answer(received, run, lambda: False)
        return FLModelUtils.to_shareable(child_protocol.answer(update))

    in_child(monkeypatch, child)
    reply = child_executor().execute("train", task(data), fl_ctx, Signal())
    expected = site_executor(FEDAVG).execute("train", task(data), fl_ctx, Signal())
    same_bytes(messages.receive_update(reply, "a").state, messages.receive_update(expected, "a").state)
    assert "fedvlp_site" not in str(reply)
    ((_, run, experiment, place, most),) = given
    assert most is None
    assert (run, fingerprint(experiment)) == (said_of(FEDAVG), fingerprint(FEDAVG))
    assert place == SitePaths("a", str(tmp_path / "a" / "runs"), str(tmp_path / "a" / "local"))


def test_a_child_is_told_how_its_worker_is_found_and_when_it_makes_way(
    data: dict[str, Pairs], fl_ctx: FLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives for this process; another takes its place when the site's own settings have changed."""
    told: list[dict[str, Any]] = []

    def child(shareable: Shareable) -> Shareable:
        told.append(FLModelUtils.from_shareable(shareable).meta["fedvlp_site"])
        return make_reply(ReturnCode.TASK_ABORTED)

    in_child(monkeypatch, child)
    settings = tmp_path / "a" / "local" / "fedvlp.json"
    settings.parent.mkdir(parents=True)
    for content in (None, "{}", "{}", '{"accept_phi_risk": true}'):
        if content is not None:
            settings.write_text(content)
        child_executor(tasks_per_trainer=7, silence=9.0).execute("train", task(data), fl_ctx, Signal())
    places = [one["worker"] for one in told]
    assert {(place["parent"], place["tasks"], place["silence"]) for place in places} == {(os.getpid(), 7, 9.0)}
    assert len({place["folder"] for place in places}) == 1
    none, one, same, another = (place["made_of"] for place in places)
    assert one == same
    assert len({none, one, another}) == 3
    child_executor(tasks_per_trainer=1).execute("train", task(data), fl_ctx, Signal())
    assert "worker" not in told[-1], "a fresh child for each task"
    with pytest.raises(ValueError, match="tasks_per_trainer is -1"):
        child_executor(tasks_per_trainer=-1)


def test_a_child_that_is_lost_is_one_sites_error_with_a_remedy(
    data: dict[str, Pairs], fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_child(monkeypatch, lambda shareable: make_reply(ReturnCode.EXECUTION_EXCEPTION))
    said = messages.failure(child_executor().execute("train", task(data), fl_ctx, Signal()))
    assert said is not None
    assert said.kind is FailureKind.LOST
    assert said.text.startswith("the training process ended or fell silent before it answered")
    assert "A smaller training.batch_size needs less memory" in said.text


def test_an_abort_of_the_childs_task_stays_one(
    data: dict[str, Pairs], fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_child(monkeypatch, lambda shareable: make_reply(ReturnCode.TASK_ABORTED))
    reply = child_executor().execute("train", task(data), fl_ctx, Signal())
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED


def test_what_the_child_says_of_its_failure_is_the_reply(
    data: dict[str, Pairs], fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = child_protocol.answer(EnvelopeError(public="training.threads is {threads}; this site has 4", threads=9))
    in_child(monkeypatch, lambda shareable: FLModelUtils.to_shareable(failed))
    with caplog.at_level(logging.ERROR):
        reply = child_executor().execute("train", task(data), fl_ctx, Signal())
    said = "EnvelopeError: training.threads is 9; this site has 4"
    assert messages.failure(reply) == Failure(FailureKind.FAILED, said)
    assert f"train failed: {said}" in caplog.text


# --- the child ---------------------------------------------------------------------------------------------------


class FakeClient:
    """nvflare.client as a child sees it: hands out ``models``, then says that there is nothing more."""

    def __init__(self, models: list[FLModel]) -> None:
        self.models, self.sent, self.ready = models, list[FLModel](), False

    def init(self) -> None:
        self.ready = True

    def is_running(self) -> bool:
        assert self.ready
        return bool(self.models)

    def receive(self) -> FLModel:
        return self.models.pop(0)

    def send(self, model: FLModel) -> None:
        self.sent.append(model)


def handed(data: dict[str, Pairs], tmp_path: Path, round: int = 0, **run: str) -> FLModel:
    """A task as the child receives it."""
    shareable = messages.send_broadcast(message(data, LOCAL, round=round), said_of(LOCAL) | run)
    place = SitePaths("a", str(tmp_path / "runs"), str(tmp_path / "local"))
    return FLModelUtils.from_shareable(child_protocol.to_child(shareable, LOCAL, place))


def replies(client: FakeClient) -> Iterator[Reply]:
    return (child_protocol.from_child(FLModelUtils.to_shareable(model), "a") for model in client.sent)


def test_the_child_answers_its_tasks_until_there_are_no_more(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient([handed(data, tmp_path, round) for round in range(2)])
    monkeypatch.setattr(child, "flare", client)
    child.main()
    updates = list(replies(client))
    assert [update.round for update in updates if isinstance(update, Update)] == [0, 1]
    memories = (tmp_path / "runs" / "toy" / "001" / "sites" / "a").glob("*.safetensors")
    assert sorted(file.name for file in memories) == ["00000-0.safetensors", "00001-0.safetensors"]


def test_the_child_tells_its_failure_and_ends(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient([handed(data, tmp_path, wire="another"), handed(data, tmp_path)])
    monkeypatch.setattr(child, "flare", client)
    child.main()
    (said,) = replies(client)
    assert isinstance(said, Failure)
    assert said.text.startswith("RefusedError: the server writes wire version another")
    assert len(client.models) == 1, "the second task was not fetched"


class Ranks:
    """Several training processes in this one: what rank 0 tells, in order, and what this rank is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, heard: list[Any]) -> None:
        self.told: list[Any] = []
        self.heard = heard
        ranks = SimpleNamespace(join=lambda: None, leave=lambda: None, together=lambda: True, rank=lambda: rank)
        monkeypatch.setattr(child, "distributed", ranks)
        monkeypatch.setattr(child.threading, "Thread", lambda **options: SimpleNamespace(start=lambda: None))
        monkeypatch.setattr(child_protocol, "to_ranks", self.exchange)

    def exchange(self, told: Any) -> Any:
        self.told.append(told)
        return self.heard.pop(0) if self.heard else told


def test_rank_0_passes_every_task_on_and_says_when_there_are_no_more(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = Ranks(monkeypatch, rank=0, heard=[])
    client = FakeClient([handed(data, tmp_path)])
    monkeypatch.setattr(child, "flare", client)
    child.main()
    (first, last) = several.told
    assert (first[0].round, first[3].site, last) == (0, "a", None)
    assert len(client.sent) == 1


def test_rank_0_that_failed_leaves_the_others_to_torchrun(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells the site first; a last word to ranks that wait in a collective would hang."""
    several = Ranks(monkeypatch, rank=0, heard=[])
    client = FakeClient([handed(data, tmp_path, wire="another")])
    monkeypatch.setattr(child, "flare", client)
    child.main()
    assert len(client.sent) == 1
    assert None not in several.told


def test_other_ranks_do_the_same_work_and_say_nothing(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank other than 0 must not touch FLARE, whose client belongs to rank 0."""
    drawn = []
    data["a"].tick = lambda: drawn.append(1)
    monkeypatch.setattr(child, "flare", None)
    Ranks(monkeypatch, rank=1, heard=[child_protocol.in_child(handed(data, tmp_path)), None])
    child.main()
    assert len(drawn) == LOCAL.method.local_steps


def test_a_rank_that_fails_gives_rank_0_time_to_speak(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept, sleep = [], time.sleep

    def noted(seconds: float) -> None:
        """FLARE's threads of earlier tests sleep as they like."""
        slept.append(seconds) if threading.current_thread() is threading.main_thread() else sleep(seconds)

    monkeypatch.setattr(child.time, "sleep", noted)
    Ranks(monkeypatch, rank=1, heard=[child_protocol.in_child(handed(data, tmp_path, wire="another"))])
    with pytest.raises(task_handler.RefusedError):
        child.main()
    assert slept == [child.LAST_WORDS]


def test_a_rank_ends_with_its_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent is 17 twice, then another process: torchrun was killed."""
    parents = [17, 17, 1]
    monkeypatch.setattr(child.os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(child.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(child.os, "_exit", lambda code: sys.exit(code))
    with pytest.raises(SystemExit) as ended:
        child._end_with(17)
    assert ended.value.code == 1
    assert not parents


def test_a_site_with_more_records_than_its_ciphertexts_hold_trains_nothing(
    data: dict[str, Pairs], fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site a has 8; what Decrypt found reaches the site in the job's own process and in a child's."""
    trained: list[int] = []
    monkeypatch.setattr(site_module, "train", lambda *args, **options: trained.append(1) or {})

    def child(shareable: Shareable) -> Shareable:
        received, run, experiment, place, most = child_protocol.in_child(FLModelUtils.from_shareable(shareable))
        try:
            update: Any = TaskHandler(experiment, place).answer(received, run, lambda: False, most)
        except Exception as error:
            update = error
        return FLModelUtils.to_shareable(child_protocol.answer(update))

    in_child(monkeypatch, child)
    for executor in (site_executor(FEDAVG), child_executor()):
        for most, refused in ((7, True), (8, False)):
            fl_ctx.set_prop(MOST_SAMPLES, most, private=True, sticky=False)
            failed = messages.failure(executor.execute("train", task(data), fl_ctx, Signal()))
            assert (failed is not None) == refused
            assert len(trained) == (not refused)
            trained.clear()
            assert failed is None or failed.text.startswith("PrivacyError: this site has 8 training records; with")


def test_a_task_reaches_the_other_ranks_as_rank_0_has_it(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through JSON and tensors by name, which is all that training/distributed.py moves."""

    def told(content: Any, tensors: Any) -> Any:
        return json.loads(json.dumps(content)), dict(tensors)

    monkeypatch.setattr(child_protocol.distributed, "tell", told)
    model = handed(data, tmp_path)
    sent, run, experiment, place, most = child_protocol.in_child(model)
    sent = Broadcast(sent.round, sent.phase, sent.state, {"public": torch.ones(2)}, lr_scale=0.5)
    passed = child_protocol.to_ranks((sent, run, experiment, place, 77))
    assert most is None
    assert passed is not None
    received, *rest = passed
    assert rest == [run, experiment, place, 77]
    assert (received.round, received.phase, received.lr_scale) == (0, "train", 0.5)
    same_bytes(received.state, sent.state)
    same_bytes(received.aux, sent.aux)
    assert child_protocol.to_ranks(None) is None
