"""A child beside a trainer that stays: what it sends back is what a child that trains by itself sends."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from support.flare_memory import on_toys, toy_experiment, toy_world
from support.simulator import assert_same_metrics, simulator
from support.toy import Pairs, clone, same_bytes, small, three_sites

from fedvlp.core.types import Broadcast, Failure, FailureKind, Update
from fedvlp.flare import child, child_front, child_protocol, messages
from fedvlp.flare.jobs import job_files
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.raw_tensors import RawTensor, raw, with_torch
from fedvlp.flare.retrying_cell import SENT_AGAIN
from fedvlp.flare.trainer_link import Answer, TrainerLink, TrainerLostError
from fedvlp.methods import METHODS
from fedvlp.run import presets
from fedvlp.run.config import identity, override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

LOCAL = toy_experiment(small(METHODS["local"]))
PLACE = {"folder": "f", "parent": 1, "started": "2", "log": "l", "made_of": "m", "tasks": 3, "silence": 4.0}


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> dict[str, Pairs]:
    found = three_sites()
    on_toys(monkeypatch, found)
    monkeypatch.setattr(child_protocol, "_parts", lambda experiment: {"settings": {"name": "toy"}, "plugins": ["p.py"]})
    monkeypatch.setattr(child_protocol, "_experiment", lambda content: LOCAL)
    return found


def handed(data: dict[str, Pairs], folder: Path, trainer: dict[str, Any] | None) -> FLModel:
    """What the child receives: tensors as bytes."""
    run = identity(LOCAL, "toy/001")
    sent = messages.send_broadcast(Broadcast(0, "train", clone(toy_world(LOCAL, data).server().state)), run)
    paths = SitePaths("a", str(folder / "runs"), str(folder / "local"))
    model: FLModel = FLModelUtils.from_shareable(child_protocol.to_child(sent, LOCAL, paths, 99, trainer))
    model.params = {name: raw(tensor) for name, tensor in model.params.items()}
    return model


def received(reply: FLModel) -> Update | Failure:
    """The child's reply as the job's process reads it."""
    if reply.params:
        reply.params = with_torch(reply.params)
    return child_protocol.from_child(FLModelUtils.to_shareable(reply), "a")


def expected(data: dict[str, Pairs], folder: Path) -> Update:
    model = handed(data, folder, None)
    model.params = with_torch(model.params)
    return child.answer(child_protocol.in_child(model))[0]


def answering(monkeypatch: pytest.MonkeyPatch, answer: Answer | TrainerLostError) -> list[Any]:
    asked: list[Any] = []

    def ask(self: TrainerLink, content: Any, tensors: Any, should_stop: Any, **limits: Any) -> Answer:
        asked.append((self, content, tensors, limits))
        if isinstance(answer, TrainerLostError):
            raise answer
        return answer

    monkeypatch.setattr(TrainerLink, "ask", ask)
    return asked


def test_the_trainers_answer_is_the_childs(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = expected(data, tmp_path)
    meta = messages.header_of(messages.from_shareable(messages.send_update(update)))
    tensors = {name: raw(tensor) for name, tensor in update.state.items()}
    asked = answering(monkeypatch, Answer(meta, tensors, {"update": 8, "figures": {}, "classes": {}, "data": "d"}))
    reply = child_front.reply(handed(data, tmp_path, PLACE))
    behind = child_protocol.behind(FLModelUtils.to_shareable(reply))
    assert behind is not None
    assert behind.update == 8
    seen = received(reply)
    assert isinstance(seen, Update)
    same_bytes(seen.state, update.state)
    assert seen.metrics == update.metrics
    ((link, content, sent, limits),) = asked
    assert (link.folder, link.parent, link.started, link.log) == (Path("f"), 1, "2", Path("l"))
    assert limits == {"made_of": "m", "tasks": 3, "silence": 4.0}
    assert (content["settings"], content["plugins"], content["most_samples"]) == ({"name": "toy"}, ["p.py"], 99)
    assert content["message"]["run"]["folder"] == "toy/001"
    assert all(isinstance(tensor, RawTensor) for tensor in sent.values())


def test_a_trainer_that_dies_in_a_task_costs_it_and_is_not_tried_again(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What killed it for lack of memory would kill this process too."""
    answering(monkeypatch, TrainerLostError("killed", begun=True))
    monkeypatch.setattr(child, "answer", None)
    lost = received(child_front.reply(handed(data, tmp_path, PLACE)))
    assert isinstance(lost, Failure)
    assert lost.kind is FailureKind.LOST
    assert lost.text == messages.CHILD_LOST


@pytest.mark.parametrize("place", [None, PLACE])
def test_without_a_trainer_the_child_trains(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, Any] | None
) -> None:
    answering(monkeypatch, TrainerLostError("it did not start"))
    seen = received(child_front.reply(handed(data, tmp_path / "seen", place)))
    assert isinstance(seen, Update)
    same_bytes(seen.state, expected(data, tmp_path / "expected").state)


def test_why_there_is_no_update_is_passed_on(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, Answer(failure=("not held", "NotHeldError: no copy", "an error")))
    failed = received(child_front.reply(handed(data, tmp_path, PLACE)))
    assert failed == Failure(FailureKind.NOT_HELD, "NotHeldError: no copy")


# --- real processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def short() -> Iterator[Path]:
    """Where trainers have their folders; the path of a socket has to be short."""
    with tempfile.TemporaryDirectory(prefix="c") as made:
        yield Path(made)


def small_job(sites: int) -> Experiment:
    """One round of two phases."""
    experiment = presets.get("feddra")
    settings = {
        "data.size": 150 * sites, "data.sites": sites, "rounds.rounds": 1, "rounds.quorum": 1, "method.local_steps": 2,
        "method.align_steps": 2, "training.batch_size": 8, "method.dro_batch": 8,
    }  # fmt: skip
    for key, value in settings.items():
        experiment = override(experiment, key, str(value))
    return experiment


def child_job(experiment: Experiment, folder: Path, tasks: Mapping[str, int]) -> Path:
    """The job as hospitals run it, in which a trainer of a site has so many ``tasks``: each site has its own app."""
    files = job_files(experiment, child=True)
    meta, client = (json.loads(files.pop(name)) for name in ("meta.json", "app/config/config_fed_client.json"))
    meta["deploy_map"] = {"app": ["server"], **{site: [site] for site in tasks}}
    for site, number in tasks.items():
        client["executors"][0]["executor"]["args"]["tasks_per_trainer"] = number
        files[f"{site}/config/config_fed_client.json"] = json.dumps(client)
        files[f"{site}/custom/README.md"] = files["app/custom/README.md"]
    for path, text in {"meta.json": json.dumps(meta), **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def processes(folder: Path, module: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if module in words and any(word.startswith(bytes(folder)) for word in words):
            found.append(int(entry.name))
    return found


def resident(process: int) -> float:
    """Bytes of memory that a process has; 0 where it is gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return 0.0


@pytest.mark.slow(seconds=90)
def test_a_job_ends_with_the_engines_bytes_however_long_a_trainer_stays(tmp_path: Path, short: Path) -> None:
    """A trainer for the job, a fresh child for each task, and one for every two tasks; nobody is left behind."""
    experiment = small_job(sites=3)
    engine = RunFolder.create(tmp_path / "engine", experiment)
    simulate(experiment, engine)
    job = child_job(experiment, tmp_path / "job", {"site-1": 0, "site-2": 1, "site-3": 2})
    done = simulator(job, tmp_path, 3, TMPDIR=str(short))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert SENT_AGAIN in done.stdout + done.stderr
    flare = RunFolder(tmp_path / "runs" / "feddra" / "001")
    assert flare.model.read_bytes() == engine.model.read_bytes()
    assert_same_metrics(flare, engine)
    until = time.monotonic() + 20
    while processes(short, b"fedvlp.flare.trainer") and time.monotonic() < until:
        time.sleep(0.2)
    assert processes(short, b"fedvlp.flare.trainer") == []


@pytest.mark.slow(seconds=60)
def test_a_trainer_that_is_killed_in_a_task_costs_that_task_alone(tmp_path: Path, short: Path) -> None:
    """Of the first one that trains; its site is back at the next task, with a trainer of its own."""
    experiment = small_job(sites=2)
    killed: list[int] = []

    def kill() -> None:
        """Once it has torch, and so is at its first task."""
        while not killed:
            for process in processes(short, b"fedvlp.flare.trainer"):
                if resident(process) > 200e6:
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)
                    return
            time.sleep(0.02)

    threading.Thread(target=kill, daemon=True).start()
    job = child_job(experiment, tmp_path / "job", {"site-1": 0, "site-2": 0})
    done = simulator(job, tmp_path, 2, TMPDIR=str(short))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert killed
    history = RunFolder(tmp_path / "runs" / "feddra" / "001").history()
    dropped = [record["dropped"] for record in history]
    assert [len(sites) for sites in dropped] == [1, *([0] * (len(history) - 1))]
    assert all("the training process ended" in text for text in dropped[0].values())
