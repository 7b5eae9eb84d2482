"""What a process without torch hands on: the tensors that torch would have sent, and the worker's answer as it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.f3.streaming.download_service import ProduceRC
from safetensors.torch import load
from support.flare_memory import on_toys, toy_experiment, toy_world
from support.simulator import assert_same_metrics, simulator
from support.toy import Pairs, clone, same_bytes, small, three_sites
from torch import Tensor

from fedvlp.core.types import Broadcast, Failure, FailureKind, Update
from fedvlp.flare import child, child_protocol, messages, relay, tensor_stream
from fedvlp.flare.jobs import job_files
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.relay import Held, HeldDecomposer
from fedvlp.flare.retrying_cell import SENT_AGAIN
from fedvlp.flare.tensor_stream import from_files, to_files
from fedvlp.flare.worker import Worker, WorkerLostError
from fedvlp.methods import METHODS
from fedvlp.run import presets
from fedvlp.run.config import identity, override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

LOCAL = toy_experiment(small(METHODS["local"]))
PLACE: dict[str, Any] = {"folder": "f", "parent": 1, "log": "l", "made_of": "m", "tasks": 3, "silence": 4.0}

# --- tensors -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "PIECE", 64)


def tensors() -> dict[str, Tensor]:
    return {
        "whole": torch.randn(4, 4), "cut": torch.randn(5, 7), "half": torch.randn(3, 41).bfloat16(),
        "codes": torch.randint(-127, 127, (300,), dtype=torch.int8), "number": torch.tensor(3.5),
        "dozen": torch.randn(12, 16),  # as text its pieces 10 and 11 come before 2
        "turned": torch.randn(9, 6).T, "empty": torch.zeros(0, 3), "counts": torch.tensor([1, -(2**40)]),
        "nan": torch.tensor([float("nan"), -0.0]), "flags": torch.tensor([True, False]),
    }  # fmt: skip


def same(left: Tensor, right: Tensor) -> bool:
    """To the last bit, nan and the sign of zero included."""

    def values(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(values(left), values(right))


def fetched(source: Any) -> list[bytes]:
    """What a receiver is given."""
    state: Any = None
    found: list[bytes] = []
    while True:
        code, items, state = source.produce(state or {}, "receiver")
        if code == ProduceRC.EOF:
            return found
        found += items


@pytest.mark.usefixtures("_small_pieces")
def test_the_worker_and_the_server_receive_each_others_tensors_through_a_process_without_torch() -> None:
    """Down: in torch's pieces, collected as files, read by the worker. Up: its files, under the names FLARE asks."""
    sent = tensors()
    down = fetched(tensor_stream.PieceDecomposer().to_downloadable(sent, 100, {}))
    held = relay._Received().consume_items(down, None)
    for name, tensor in sent.items():
        assert same(from_files(held[name].files), tensor)
    answer = {f"T{number}": Held(to_files(tensor)) for number, tensor in enumerate(sent.values())}
    up = [load(item) for item in fetched(HeldDecomposer().to_downloadable(answer, 100, {}))]
    pieces = {name: piece for item in up for name, piece in item.items()}
    assert max(piece.numel() * piece.element_size() for piece in pieces.values()) <= 64
    groups = tensor_stream.grouped(pieces)
    assert len(groups) == len(sent)
    for (name, names), tensor in zip(
        sorted(groups.items(), key=lambda item: int(item[0][1:])), sent.values(), strict=True
    ):
        assert same(tensor_stream.joined([pieces[piece] for piece in names], names), tensor), name
    with pytest.raises(RuntimeError, match="missing"):
        from_files(held["cut"].files[:1])


SERIALISED = """
import sys
from nvflare.fuel.utils import fobs
from fedvlp.flare import messages, relay
messages.register(relay.HeldDecomposer())
file = bytes.fromhex(sys.argv[1])
sent = fobs.dumps({"w": relay.Held([file])})
assert fobs.loads(sent)["w"].files[0].endswith(file[-8:])
assert "torch" not in sys.modules
print(sent.hex())
"""


def test_flares_serialiser_takes_them_for_torchs() -> None:
    from nvflare.fuel.utils import fobs

    sent = torch.tensor([[1.5, -2.0]])
    command = [sys.executable, "-c", SERIALISED, to_files(sent)[0].hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    messages.register()
    assert torch.equal(fobs.loads(bytes.fromhex(done.stdout))["w"], sent)


# --- the child of a hospital's job -------------------------------------------------------------------------------


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> dict[str, Pairs]:
    found = three_sites()
    on_toys(monkeypatch, found)
    monkeypatch.setattr(child_protocol, "_parts", lambda experiment: {"settings": {}, "plugins": []})
    monkeypatch.setattr(child_protocol, "Experiment", lambda: LOCAL)
    return found


def handed(data: dict[str, Pairs], folder: Path) -> FLModel:
    """What the child receives."""
    run = identity(LOCAL, "toy/001")
    sent = messages.send_broadcast(Broadcast(0, "train", clone(toy_world(LOCAL, data).server().state)), run)
    paths = SitePaths("a", str(folder / "runs"), str(folder / "local"))
    model: FLModel = FLModelUtils.from_shareable(child_protocol.to_child(sent, LOCAL, paths, 99, PLACE))
    return model


def without_torch(model: FLModel) -> FLModel:
    model.params = {name: Held(to_files(tensor)) for name, tensor in model.params.items()}
    return model


def received(reply: FLModel) -> Update | Failure:
    """The child's reply as the job's process reads it."""
    if reply.params:
        reply.params = {name: from_files(held.files) for name, held in reply.params.items()}
    return child_protocol.from_child(FLModelUtils.to_shareable(reply), "a")


def answering(monkeypatch: pytest.MonkeyPatch, answer: tuple[dict[str, Any], Any] | WorkerLostError) -> list[Any]:
    asked: list[Any] = []

    def ask(self: Worker, *content: Any) -> Any:
        asked.append((self, *content))
        if isinstance(answer, WorkerLostError):
            raise answer
        return answer

    monkeypatch.setattr(Worker, "ask", ask)
    return asked


def test_the_workers_answer_is_the_childs(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, _ = child.answer(child_protocol.in_child(handed(data, tmp_path)))
    header, state = child_protocol.apart(messages.send_update(update))
    behind = {"update": 8, "figures": {}, "classes": {}, "data": "d"}
    files = {name: to_files(tensor) for name, tensor in state.items()}
    asked = answering(monkeypatch, ({"update": header, "behind": behind}, files))
    reply = relay.reply(without_torch(handed(data, tmp_path)))
    counted = child_protocol.behind(FLModelUtils.to_shareable(reply))
    assert counted is not None
    assert counted.update == 8
    seen = received(reply)
    assert isinstance(seen, Update)
    same_bytes(seen.state, update.state)
    assert seen.metrics == update.metrics
    ((worker, content, sent, _),) = asked
    assert worker == Worker(**PLACE)
    assert content["most_samples"] == 99
    assert content["message"]["run"]["folder"] == "toy/001"
    task = child_protocol.task_of(content, {name: from_files(pieces) for name, pieces in sent.items()})
    assert task[1:] == child_protocol.in_child(handed(data, tmp_path))[1:], "the worker does what the child would do"


def test_a_worker_that_dies_in_a_task_costs_it(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What killed it for lack of memory would kill the next one too."""
    asked = answering(monkeypatch, WorkerLostError("killed"))
    lost = received(relay.reply(without_torch(handed(data, tmp_path))))
    assert lost == Failure(FailureKind.LOST, messages.CHILD_LOST, messages.CHILD_LOST)
    assert len(asked) == 1


def test_why_there_is_no_update_is_passed_on(
    data: dict[str, Pairs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, ({"failure": ["unreadable", "CodecError: no codes", "an error"]}, {}))
    failed = received(relay.reply(without_torch(handed(data, tmp_path))))
    assert failed == Failure(FailureKind.UNREADABLE, "CodecError: no codes")


# --- real processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def short() -> Iterator[Path]:
    """Where workers have their folders; the path of a socket has to be short."""
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
    """The job as hospitals run it, in which a worker of a site has so many ``tasks``: each site has its own app."""
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
def test_a_job_ends_with_the_engines_bytes_however_long_a_worker_stays(tmp_path: Path, short: Path) -> None:
    """A worker for the job, a fresh child for each task, and one for every two tasks; nobody is left behind."""
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
    while processes(short, b"fedvlp.flare.worker") and time.monotonic() < until:
        time.sleep(0.2)
    assert processes(short, b"fedvlp.flare.worker") == []


@pytest.mark.slow(seconds=60)
def test_a_worker_that_is_killed_in_a_task_costs_that_task_alone(tmp_path: Path, short: Path) -> None:
    """Of the first one that trains; its site is back at the next task, with a worker of its own."""
    experiment = small_job(sites=2)
    killed: list[int] = []

    def kill() -> None:
        """Once it has torch, and so is at its first task."""
        while not killed:
            for process in processes(short, b"fedvlp.flare.worker"):
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
