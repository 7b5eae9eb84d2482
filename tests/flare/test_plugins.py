"""A method in a file of somebody's folder: what a job brings of it. tests/test_extending.py compares the bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs
from support.flare_memory import MemoryFlare, toy_experiment
from support.plugins import PULLED, forget, fresh, installed, pulled
from support.toy import three_sites
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.core.types import Broadcast
from fedvlp.flare import child_protocol, messages
from fedvlp.flare.jobs import job_files, write_job
from fedvlp.flare.paths import SitePaths
from fedvlp.run import plugins, presets
from fedvlp.run.config import fingerprint


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


def test_a_job_brings_the_file_and_names_its_class(tmp_path: Path) -> None:
    plugins.use(pulled(tmp_path))
    files = job_files(presets.get("pulled"))
    assert files["app/custom/pulled_method.py"] == PULLED
    for side, entry in (("server", "workflows"), ("client", "executors")):
        part = json.loads(files[f"app/config/config_fed_{side}.json"])[entry][0]
        assert (part.get("executor") or part)["args"]["method"]["path"] == "pulled_method.Pulled"
    assert not [path for path in job_files(presets.get("fedavg")) if path.startswith("app/custom/") and "py" in path]


def test_a_job_without_code_cannot_bring_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hospitals that take no code install the plugin: then its class alone is named."""
    plugins.use(pulled(tmp_path))
    with pytest.raises(plugins.PluginError, match=r"app/custom/pulled_method\.py.* entry point in the group"):
        job_files(presets.get("pulled"), custom=False)
    forget()
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site", "their_methods", PULLED)))
    files = job_files(presets.get("pulled"), custom=False)
    assert not [path for path in files if path.startswith("app/custom")]
    assert "their_methods.Pulled" in files["app/config/config_fed_client.json"]


def test_a_package_that_is_not_installed_cannot_be_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled(tmp_path / "lab", "ours")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.use("lab.ours")
    with pytest.raises(plugins.PluginError, match=r"plugin lab\.ours is in a package, which a job cannot bring"):
        job_files(presets.get("pulled"))


def test_build_writes_a_job_for_each_preset_of_a_plugin_and_checks_it(tmp_path: Path) -> None:
    file = pulled(tmp_path)
    arguments = ["jobs", "build", "--folder", str(tmp_path / "jobs"), "--plugin", str(file)]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert [entry.name for entry in (tmp_path / "jobs").iterdir()] == ["pulled"]
    CliRunner().invoke(app, [*arguments, "--check"], catch_exceptions=False)
    (tmp_path / "jobs" / "pulled" / "app" / "custom" / "pulled_method.py").write_text("")
    with pytest.raises(ValueError, match=r"not what the presets say: pulled/app/custom/pulled_method\.py"):
        CliRunner().invoke(app, [*arguments, "--check"], catch_exceptions=False)


def test_a_job_begins_no_run_beside_one_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends and says which run it is; once the folder is elsewhere, the same job begins anew."""
    flare = MemoryFlare(tmp_path, monkeypatch, toy_experiment(), three_sites())
    run = tmp_path / "server" / "runs" / "toy" / "001"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{")
    said = flare.submit().panic
    assert "UnreadableRunError: run toy/001 has not finished, and its configuration cannot be read" in said
    assert [entry.name for entry in run.parent.iterdir()] == ["001"]
    run.rename(tmp_path / "elsewhere")
    assert not flare.submit().panic
    assert flare.run.model.exists()


def test_the_training_child_imports_what_the_jobs_process_had(tmp_path: Path) -> None:
    """The job's process says which file; the child, which was told nothing else, builds the same experiment."""
    plugins.use(pulled(tmp_path))
    messages.register()
    chosen: Any = replace(presets.get("pulled"), name="sent")
    expected = fingerprint(chosen)
    task = messages.send_broadcast(Broadcast(0, "train", {}), {"folder": "sent/001", "fingerprint": "", "version": ""})
    task.set_header("task_id", "1")
    handed = fobs.loads(fobs.dumps(child_protocol.to_child(task, chosen, SitePaths("site-1", "", ""))))
    forget()
    _, _, experiment, _, _ = child_protocol.in_child(FLModelUtils.from_shareable(handed))
    assert fingerprint(experiment) == expected
    assert experiment.method is not chosen.method
    assert write_job(experiment, tmp_path / "job").name == "job"
