"""Two processes per site, started by torchrun through FLARE's external-process execution."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.event_type import EventType
from support.short_runs import without
from support.simulator import simulator

from fedvlp.core.checkpoint import load_tensors
from fedvlp.deploy.site_config import FILE, processes_at
from fedvlp.flare import executor
from fedvlp.flare.executor import command
from fedvlp.flare.jobs import job_files, write_job
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder

# AdamW divides by the size of a gradient, also where that is rounding alone; so here it is SGD, at a rate at which a
# last bit that differs in one step is no larger a few steps later
SETTINGS = {
    "data.sites": 2, "training.optimizer": "sgd", "training.lr": 0.0005, "training.weight_decay": 0.0,
    "training.warmup_steps": 0, "training.gather_negatives": "true", "training.batch_size": 16,
    "rounds.rounds": 2, "data.size": 300, "method.local_steps": 2,
}  # fmt: skip


def pair(**settings: object) -> Experiment:
    experiment = presets.get("fedavg")
    for key, value in {**SETTINGS, **settings}.items():
        experiment = override(experiment, key, str(value))
    return experiment


def test_a_job_says_how_many_processes_and_one_is_no_torchrun() -> None:
    job = json.loads(job_files(pair(), child=True, processes=2)["app/config/config_fed_client.json"])
    assert job["executors"][0]["executor"]["args"]["processes"] == 2
    alone = json.loads(job_files(pair(), child=True)["app/config/config_fed_client.json"])
    assert "processes" not in alone["executors"][0]["executor"]["args"]
    assert command(1) == [sys.executable, "-u", "-m", "fedvlp.flare.child"]
    assert "--nproc-per-node=4" in command(4)


def test_the_sites_own_file_may_say_it(tmp_path: Path) -> None:
    assert processes_at(tmp_path) == 0
    (tmp_path / FILE).write_text('{"processes": 3}')
    assert processes_at(tmp_path) == 3
    (tmp_path / FILE).write_text('{"processes": -1}')
    assert processes_at(tmp_path) == 0, "the task's answer says what is wrong"


@pytest.mark.parametrize(("own", "expected"), [("{}", 2), ('{"processes": 3}', 3), ('{"processes": 1}', 1)])
def test_it_overrules_the_job(own: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.SitePaths, "of", lambda fl_ctx: executor.SitePaths("site-1", "", str(tmp_path)))
    started: list[list[str]] = []
    monkeypatch.setattr(executor.ClientAPIExecutor, "handle_event", lambda self, *_: started.append(self._command))
    (tmp_path / FILE).write_text(own)
    monkeypatch.setattr(executor.ChildExecutor, "_worker", lambda self, fl_ctx: {})
    child = executor.ChildExecutor(processes=2, name="x", method=pair().method)
    cell = SimpleNamespace(decode_pass_through_topics=set())
    engine = SimpleNamespace(get_cell=lambda: cell)
    child.handle_event(EventType.START_RUN, SimpleNamespace(get_engine=lambda: engine))  # type: ignore[arg-type]
    assert started == [command(expected, stays=True)]


@pytest.mark.slow(seconds=80)
def test_two_processes_per_site_train_what_the_engine_trains_in_one_and_a_rank_may_die(
    tmp_path: Path,
) -> None:
    """SIGKILL to rank 1 of site-2 in its first task: an error reply, the round goes on with site-1, and site-2 is back.

    The engine's run is one in which site-2 does not answer that task.
    """
    experiment = pair()
    killed: list[int] = []
    done = threading.Event()
    watcher = threading.Thread(target=kill_once, args=(str(tmp_path), killed, done))
    watcher.start()
    finished = simulator(write_job(experiment, tmp_path / "job", child=True, processes=2), tmp_path, 2)
    done.set()
    watcher.join()
    assert killed, "rank 1 was seen"
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    flare = RunFolder(tmp_path / "runs" / "fedavg" / "001")
    assert [list(record["dropped"]) for record in flare.history()] == [["site-2"], [], []]

    engine = without(experiment, {("site-2", 0)}, tmp_path)
    theirs, ours = (load_tensors(folder.model)[0] for folder in (flare, engine))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.allclose(theirs[name].double(), tensor.double(), rtol=0, atol=1e-5), name
    losses = [
        [record["sites"][site]["loss/contrastive"] for record in folder.history() for site in sorted(record["sites"])
         if "loss/contrastive" in record["sites"][site]] for folder in (flare, engine)
    ]  # fmt: skip
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def kill_once(folder: str, killed: list[int], done: threading.Event) -> None:
    """Waits for rank 1 of a trainer of site-2 that runs under ``folder``, and kills it once it trains."""
    while not done.is_set() and not killed:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                inside = str((entry / "cwd").readlink())
                mine = b"LOCAL_RANK=1" in environment and inside.startswith(folder) and "site-2" in inside
                if mine and b"fedvlp.flare.child" in (entry / "cmdline").read_bytes():
                    time.sleep(1.0)
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed.append(int(entry.name))
                    return
            except OSError:
                continue
        time.sleep(0.1)
