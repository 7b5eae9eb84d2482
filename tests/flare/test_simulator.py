"""`nvflare simulator` trains the same bytes as the engine, at any number of threads, and leaves its results outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from flare_simulator import simulator
from toy import same_bytes

from fedvlp import presets
from fedvlp.config import override
from fedvlp.core.server import Server
from fedvlp.experiment import Experiment
from fedvlp.flare.jobs import write_job
from fedvlp.runs import RunFolder, simulate

pytestmark = pytest.mark.slow

EIGHT_BIT = {"wire.difference": "true", "wire.skip_unchanged": "true", "wire.down": "int8", "wire.up": "int8"}
SERVER_TRAINS = {"rounds.rounds": 2, "method.local_epochs": 1, "method.server_steps": 2, "method.distil_steps": 2}


def small(name: str, **settings: object) -> Experiment:
    """The preset with a few steps on a small cohort."""
    chosen = {
        "data.size": 700, "rounds.rounds": 1, "method.local_steps": 2, "training.batch_size": 16,
        **({"method.align_steps": 2} if name == "feddra" else {}), **settings,
    }  # fmt: skip
    experiment = presets.get(name)
    for key, value in chosen.items():
        experiment = override(experiment, key, str(value))
    return experiment


@pytest.mark.parametrize(
    ("name", "threads", "settings"),
    [
        ("fedavg", 1, {}),
        ("fedavg", 5, {"rounds.rounds": 2}),
        ("feddra", 1, {}),
        ("feddra", 5, {"rounds.rounds": 2}),
        ("feddra", 5, {"rounds.rounds": 2, **EIGHT_BIT}),
        ("local", 1, {"rounds.rounds": 2, "data.sites": 2}),  # memory must survive the restart of every process
        ("pms-fm", 2, {"rounds.rounds": 2, "data.size": 500}),  # so must personalised models and Adam moments
        ("creamfl", 5, SERVER_TRAINS),
        ("car-mfl", 1, {"rounds.rounds": 2, "data.sites": 2, "partition.image_only": 1}),  # partners are memory too
    ],
)
def test_same_bytes_as_the_engine(name: str, threads: int, settings: dict[str, object], tmp_path: Path) -> None:
    experiment = small(name, **settings)
    engine = RunFolder.create(tmp_path / "engine", experiment)
    simulate(experiment, engine)
    done = simulator(write_job(experiment, tmp_path / "job"), tmp_path, threads)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    flare = RunFolder(tmp_path / "runs" / name / "001")
    assert flare.model.read_bytes() == engine.model.read_bytes()
    same_metrics(flare, engine)
    assert (flare.path / "metrics.csv").exists()
    assert {entry.name for entry in (flare.path / "tb").iterdir()} >= {"site-1", "site-2"}
    same_bytes(*(Server.load(folder.checkpoint)[0].memory for folder in (flare, engine)))
    memories = sorted((engine.path / "sites").rglob("*.safetensors"))
    remembering = {"local": 2, "creamfl": 5, "car-mfl": 1}.get(name, 0) if experiment.wire.plain else 5
    assert len(memories) == 2 * remembering, "two versions at each site"
    for memory in memories:
        assert (flare.path / memory.relative_to(engine.path)).read_bytes() == memory.read_bytes()


def same_metrics(flare: RunFolder, engine: RunFolder) -> None:
    """Every metric of every site agrees, seconds aside (a site that lacks a modality may have none of retrieval)."""
    compared = 0
    for theirs, ours in zip(flare.history(), engine.history(), strict=True):
        assert (theirs["round"], theirs["phase"], theirs["dropped"]) == (ours["round"], ours["phase"], {})
        assert theirs["server"] == ours["server"]
        for site, metrics in ours["sites"].items():
            expected = {name: value for name, value in metrics.items() if name != "seconds"}
            assert {name: value for name, value in theirs["sites"][site].items() if name != "seconds"} == expected
            compared += len(expected)
    assert compared


def test_tensorboard_has_every_site_and_the_servers_curves(tmp_path: Path) -> None:
    """The sites' curves come through FLARE's event streaming; worst site, weights and bytes from the server."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = simulator(write_job(small("feddra", **{"rounds.rounds": 2}), tmp_path / "job"), tmp_path, 5)
    assert done.returncode == 0
    folder = tmp_path / "runs" / "feddra" / "001" / "tb"
    curves = {}
    for entry in folder.iterdir():
        events = EventAccumulator(str(entry))
        events.Reload()
        curves[entry.name] = {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}
    for site in (f"site-{index}" for index in range(1, 6)):
        assert curves[site]["loss/contrastive/align"] == curves[site]["loss/contrastive/joint"] == 2
        assert curves[site]["val/all/mean/r1"] == 3, "initial model, after round 1, trained model"
    server = curves[next(name for name in curves if "server" in name)]
    for tag in ("val/all/mean/r1/worst", "dro_weights/site-3", "bytes_up/align", "seconds/joint"):
        assert server[tag] >= 2, tag


def test_a_lost_quorum_fails_the_job_and_the_same_job_resumes(tmp_path: Path) -> None:
    """A learning rate that explodes at every site: exit code 2, the reason in run_status.json, nothing half-done."""
    experiment = small("fedavg", **{"training.lr": 1e30, "rounds.rounds": 2})
    done = simulator(write_job(experiment, tmp_path / "job"), tmp_path, 5)
    assert done.returncode == 2
    folder = RunFolder(tmp_path / "runs" / "fedavg" / "001")
    status = (folder.path / "run_status.json").read_text()
    assert '"stopped"' in status
    assert "0 valid updates, 4 needed" in status
    assert not folder.model.exists()
    assert RunFolder.latest(tmp_path / "runs", experiment) == folder
