"""The committed job folders are what the presets say, and FLARE can build every one of their components."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext

from fedvlp.deploy.named_data import NamedData, SiteConfigError
from fedvlp.flare.host_gpus import HostGPUs
from fedvlp.flare.jobs import COMMITTED, folder_of, job_files, write_job
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import from_config, override

JOBS = Path(__file__).parents[2] / "jobs"
PROVISIONING = Path(__file__).parents[2] / "provisioning"


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_job_is_up_to_date(name: str) -> None:
    files = job_files(presets.get(name))
    folder = JOBS / folder_of(name)
    committed = {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*") if f.is_file()}
    assert committed == files, "run `fedvlp jobs build`"


def test_there_is_no_other_job() -> None:
    assert sorted(entry.name for entry in JOBS.iterdir()) == sorted(map(folder_of, COMMITTED))


@pytest.mark.parametrize("name", COMMITTED)
def test_the_job_describes_the_preset_to_both_sides(name: str) -> None:
    """Server and sites build the same experiment from it, field by field, and the job names its sites."""
    files = {path: json.loads(text) for path, text in job_files(presets.get(name)).items() if path.endswith("json")}
    server = files["app/config/config_fed_server.json"]["workflows"][0]["args"]
    client = files["app/config/config_fed_client.json"]["executors"][0]["executor"]["args"]["settings"]
    for args in (server, client):
        built = presets.Experiment(**{key: from_config(value) for key, value in args.items()})
        assert built == presets.get(name)
    assert files["meta.json"]["deploy_map"]["app"] == ["server", *Assembly(presets.get(name)).sites()]


def test_every_phase_has_an_executor_and_filters_name_tasks_exactly() -> None:
    client = json.loads(job_files(presets.get("feddra"))["app/config/config_fed_client.json"])
    assert client["executors"][0]["tasks"] == ["align", "evaluate", "joint"]


def test_export_kinds(tmp_path: Path) -> None:
    installed = write_job(presets.get("fedavg"), tmp_path / "installed", custom=False)
    assert not (installed / "app" / "custom").exists(), "a hospital with BYOC off would refuse it"
    bundled = write_job(presets.get("fedavg"), tmp_path / "bundled", bundled=True)
    assert (bundled / "app" / "custom" / "fedvlp" / "core" / "method.py").exists()
    assert not list(bundled.rglob("__pycache__"))


def test_a_folder_that_is_not_a_job_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="holds no FLARE job"):
        write_job(presets.get("fedavg"), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("job", [False, True])
def test_a_file_that_no_job_has_is_not_deleted(job: bool, tmp_path: Path) -> None:
    """A meta.json alone makes no job, and beside the files of one a note is not the job's."""
    if job:
        write_job(presets.get("fedavg"), tmp_path)
    else:
        (tmp_path / "meta.json").write_text("{}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "notes.txt").write_text("precious")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = "holds sub/notes.txt, which is no file of an exported job" if job else "holds no FLARE job"
    with pytest.raises(FileExistsError, match=said):
        write_job(presets.get("feddra"), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_exported_job_is_replaced_whole(tmp_path: Path) -> None:
    """Code that the job brought before would else be sent with the new one. FLARE signs the folder when it is sent."""
    write_job(presets.get("fedavg"), tmp_path, bundled=True)
    for signed in (".__nvfl_sig.json", ".__nvfl_submitter.crt", "app/config/.__nvfl_sig.json"):
        (tmp_path / signed).write_text("{}")
    (tmp_path / "app" / "custom" / "my_method.py").write_text("")
    write_job(presets.get("feddra"), tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == set(job_files(presets.get("feddra")))


def test_a_job_for_hospitals_names_them_and_their_data_and_no_path(tmp_path: Path) -> None:
    """As `fedvlp jobs export --data named:pretrain --at ...` writes it."""
    experiment = replace(presets.get("fedavg"), data=NamedData("pretrain"))
    files = job_files(experiment, custom=False, sites=("st-anna", "northgate", "riverside"))
    meta = json.loads(files["meta.json"])
    assert meta["deploy_map"] == {"app": ["server", "northgate", "riverside", "st-anna"]}
    assert meta["min_clients"] == 2
    client = json.loads(files["app/config/config_fed_client.json"])["executors"][0]["executor"]["args"]
    assert client["data"] == {
        "path": "fedvlp.deploy.NamedData", "args": {"name": "pretrain", "image_size": 72, "public": ""},
    }  # fmt: skip
    server = json.loads(files["app/config/config_fed_server.json"])
    assert server["components"][-1]["id"] == "results", "copies what the others have written"


@pytest.mark.parametrize(("drawn", "quorum", "least"), [(2, 0, 2), (2, 1, 1), (0, 0, 4), (9, 0, 4), (9, 3, 3)])
def test_a_job_goes_on_with_as_many_sites_as_a_round_asks(drawn: int, quorum: int, least: int) -> None:
    """Of five sites, two may die where a round draws two of them; FLARE ended such a job."""
    experiment = presets.get("creamfl")
    for key, value in {"method.sites_per_round": drawn, "rounds.quorum": quorum}.items():
        experiment = override(experiment, key, str(value))
    assert json.loads(job_files(experiment)["meta.json"])["min_clients"] == least


def test_no_site_has_the_name_of_all_records_in_one_place() -> None:
    with pytest.raises(ValueError, match="no site may be named pooled"):
        job_files(replace(presets.get("fedavg"), data=NamedData("pretrain")), sites=["site-1", "pooled"])


def test_a_job_over_the_sites_own_data_must_say_which_sites() -> None:
    with pytest.raises(SiteConfigError, match="with --at"):
        job_files(replace(presets.get("fedavg"), data=NamedData("pretrain")))


def test_two_jobs_at_once_reserve_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's own classes with two pretended GPUs of 16 GiB, and jobs that take 10 GiB of one."""
    from nvflare.app_common.resource_consumers import gpu_resource_consumer as consumer
    from nvflare.app_common.resource_managers.gpu_resource_manager import GPUResourceManager

    files = job_files(presets.get("fedavg"), gpus=1, gpu_memory=10)
    spec = json.loads(files["meta.json"])["resource_spec"]["site-1"]
    monkeypatch.setattr(consumer, "get_host_gpu_ids", lambda: [0, 1])
    monkeypatch.setattr(consumer, "get_host_gpu_memory_free", lambda unit: [16384, 16384])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    manager, seen = GPUResourceManager(2, 16, ignore_host=True), []
    for _ in range(2):
        fits, token = manager.check_resources(spec, FLContext())
        assert fits
        consumer.GPUResourceConsumer().consume(manager.allocate_resources(spec, token, FLContext()))
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["0", "1"]
    assert not manager.check_resources(spec, FLContext())[0]
    with pytest.raises(ValueError, match="belong together"):
        job_files(presets.get("fedavg"), gpus=1)


NVIDIA_SMI = """#!/bin/sh
case "$1" in
  *index) printf 'index\\n{index}' ;;
  *) printf 'memory.total [MiB]\\n{memory}' ;;
esac
exit {code}
"""


@pytest.mark.parametrize(
    ("machine", "visible", "offered"),
    [
        (None, None, {}),
        ({"index": "", "memory": "", "code": 9}, None, {}),  # its driver does not answer
        ({"index": "", "memory": "", "code": 0}, None, {}),
        ({"index": "0\\n1\\n", "memory": "81920 MiB\\n16384 MiB\\n", "code": 0}, None, {0: 16.0, 1: 16.0}),
        ({"index": "0\\n1\\n", "memory": "81920 MiB\\n16384 MiB\\n", "code": 0}, "0", {0: 80.0}),
        ({"index": "0\\n", "memory": "16384 MiB\\n", "code": 0}, "", {}),
    ],
)
def test_a_site_as_shipped_offers_what_its_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: dict[str, Any] | None, visible: str | None,
    offered: dict[int, float],
) -> None:  # fmt: skip
    """With the arguments of provisioning/site/resources.json, and a pretended nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if machine is not None:
        (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI.format(**machine))
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    shipped = json.loads((PROVISIONING / "site" / "resources.json").read_text())["components"][0]
    assert (shipped["id"], shipped["path"]) == ("resource_manager", "fedvlp.flare.HostGPUs")
    manager = HostGPUs(**shipped["args"])
    assert {gpu: resource.memory for gpu, resource in manager.resources.items()} == offered
    assert list(HostGPUs(num_of_gpus=0).resources) == []
    assert manager.check_resources({"num_of_gpus": 1, "mem_per_gpu_in_GiB": 10}, FLContext())[0] == bool(offered)


def test_a_site_may_offer_less_than_its_machine_has_and_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvflare.app_common.resource_managers import gpu_resource_manager as theirs

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(theirs, "get_host_gpu_ids", lambda: [0, 1])
    monkeypatch.setattr(theirs, "get_host_gpu_memory_total", lambda: [16384, 16384])
    fewer = HostGPUs(num_of_gpus=1, mem_per_gpu_in_GiB=8)
    assert {gpu: resource.memory for gpu, resource in fewer.resources.items()} == {0: 8}
    with pytest.raises(ValueError, match="exceeds available GPUs"):
        HostGPUs(num_of_gpus=3)
