"""`nvflare simulator` trains the engine's bytes, whatever a site must remember while its process comes and goes.

With fewer threads than sites FLARE starts a site's process anew for every task. Plain FedDRA at two threads is
tests/flare/test_smoke.py, at five and at one the README's own commands (tests/test_commands.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.halves import experiment as experiment_of_halves
from support.halves import table as table_of_halves
from support.short_jobs import of_its_sites
from support.simulator import assert_same_metrics, simulator
from support.toy import same_bytes

from fedvlp.core.server_state import Server
from fedvlp.data.cohort import PUBLIC
from fedvlp.deploy.named_data import NamedData
from fedvlp.deploy.site_config import own_source, public_source
from fedvlp.flare.jobs import write_job
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import for_sites, undealt
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.run.site_sources import SiteSources

pytestmark = pytest.mark.slow(seconds=50)

EIGHT_BIT = {"wire.down": "bfloat16", "wire.up": "int8"}
ADAPTERS = {"model.adapters": "lora", "model.adapter_layers": "every", "model.adapter_private": "true"}
OWN_NORM = {"model.head_norm": "batch", "norm_statistics": "site"}
SERVER_TRAINS = {"method.local_epochs": 1, "method.server_steps": 2, "method.distil_steps": 2}


def small(name: str, **settings: object) -> Experiment:
    """The preset with two rounds of a few steps on a small cohort."""
    chosen = {
        "data.size": 500, "rounds.rounds": 2, "method.local_steps": 2, "training.batch_size": 16, **settings,
    }  # fmt: skip
    experiment = presets.get(name)
    for key, value in chosen.items():
        experiment = override(experiment, key, str(value))
    return of_its_sites(experiment)


@pytest.mark.parametrize(
    ("name", "threads", "remembering", "settings"),
    [
        # ends of the wire; control variates of sites and server, and which change was counted; own statistics
        ("scaffold", 1, 4, {"data.sites": 2, **EIGHT_BIT, **OWN_NORM}),
        # each batch's encoding projected twice; a site's own aligner
        ("fedrgb", 2, 2, {"data.sites": 2, "method.aligner_steps": 2}),
        ("one-round-cca", 2, 0, {"data.sites": 2}),  # moments, and heads that the server solves for
        ("pms-fm", 2, 0, {"data.sites": 3}),  # personalised models and Adam's moments, at the server
        ("creamfl", 5, 5, {"data.size": 700, **SERVER_TRAINS}),  # a model of another architecture at each site
        ("car-mfl", 1, 1, {"data.sites": 2, "data.size": 700, "partition.image_only": 1}),  # partners by round
        # ends of the wire again; frozen towers, and adapters that stay at their sites
        ("fedavg", 2, 4, {"data.sites": 2, **ADAPTERS, **EIGHT_BIT}),
    ],
)
def test_same_bytes_as_the_engine(
    name: str, threads: int, remembering: int, settings: dict[str, object], tmp_path: Path
) -> None:
    """Model, server memory, the memories of ``remembering`` sites (one version a task), and every metric."""
    experiment = small(name, **settings)
    engine = RunFolder.create(tmp_path / "engine", experiment)
    simulate(experiment, engine)
    done = simulator(write_job(experiment, tmp_path / "job"), tmp_path, threads)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    flare = RunFolder(tmp_path / "runs" / name / "001")
    assert flare.model.read_bytes() == engine.model.read_bytes()
    assert_same_metrics(flare, engine)
    same_bytes(*(Server.load(folder.checkpoint)[0].memory for folder in (flare, engine)))
    memories = sorted((engine.path / "sites").rglob("*.safetensors"))
    assert len(memories) == 3 * remembering  # two rounds and the evaluation
    for memory in memories:
        assert (flare.path / memory.relative_to(engine.path)).read_bytes() == memory.read_bytes()


def test_sites_and_server_that_name_a_public_set_are_the_engine_that_has_all_records(tmp_path: Path) -> None:
    """Each process draws what it has by the names in the job, and the server's model learns from the public set."""
    usual, sites = small("creamfl", **SERVER_TRAINS), ("northgate", "st-anna")
    data = NamedData("synthetic", 36, public="synthetic")
    experiment = for_sites(replace(usual, data=data, partition=undealt(usual.partition)), sites)
    sources = ((PUBLIC, public_source(data, tmp_path)), *((site, own_source(data, site, tmp_path)) for site in sites))
    whole = replace(experiment, data=SiteSources(sources))
    engine = RunFolder.create(tmp_path / "engine", whole)
    simulate(whole, engine)
    done = simulator(write_job(experiment, tmp_path / "job", sites=sites), tmp_path, 2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    flare = RunFolder(tmp_path / "runs" / "creamfl" / "001")
    assert flare.model.read_bytes() == engine.model.read_bytes()
    assert_same_metrics(flare, engine)
    same_bytes(*(Server.load(folder.checkpoint)[0].memory for folder in (flare, engine)))


LENT = {"partition.retrieve": "1", "partition.left_out": "texts"}


@pytest.mark.parametrize(
    ("name", "settings"), [("car-mfl", {}), ("creamfl", {}), ("pms-fm", LENT), ("one-round-cca", LENT)]
)
def test_hospitals_that_lack_a_half_are_the_engines(name: str, settings: dict[str, str], tmp_path: Path) -> None:
    """From one table with pairs, images, reports, a hospital of all three, and a public set."""
    chosen = experiment_of_halves(name, table_of_halves(tmp_path / "data"), **settings)
    engine = RunFolder.create(tmp_path / "engine", chosen)
    simulate(chosen, engine)
    done = simulator(write_job(chosen, tmp_path / "job"), tmp_path, 2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    flare = RunFolder(tmp_path / "runs" / name / "001")
    assert flare.model.read_bytes() == engine.model.read_bytes()
    assert_same_metrics(flare, engine)


def test_a_lost_quorum_fails_the_job_and_the_same_job_resumes(tmp_path: Path) -> None:
    """A learning rate that explodes at every site: exit code 2, the reason in run_status.json, nothing half-done."""
    experiment = small("fedavg", **{"training.lr": 1e30, "data.sites": 1})
    done = simulator(write_job(experiment, tmp_path / "job"), tmp_path, 1)
    assert done.returncode == 2
    folder = RunFolder(tmp_path / "runs" / "fedavg" / "001")
    status = json.loads((folder.path / "run_status.json").read_text())
    assert status["status"] == "stopped"
    assert "0 valid updates, 1 needed" in status["reason"]
    assert not folder.model.exists()
    assert RunFolder.latest(tmp_path / "runs", experiment) == folder
