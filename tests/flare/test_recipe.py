"""The recipe exports the very job that the CLI writes, and runs in FLARE's simulation environment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedvlp.flare.jobs import job_files
from fedvlp.flare.recipe import FedVLPRecipe, refuse_other_sites
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.folder import RunFolder

SETTINGS = {"data.size": 300, "data.sites": 2, "rounds.rounds": 1, "method.local_steps": 1, "training.batch_size": 16}


def test_the_exported_job_is_the_clis(tmp_path: Path) -> None:
    FedVLPRecipe("feddra", {"method.rho": 0.5}).export(str(tmp_path))
    folder = tmp_path / "feddra"
    exported = {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*") if f.is_file()}
    assert exported == job_files(override(presets.get("feddra"), "method.rho", "0.5"))


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'rho'"):
        FedVLPRecipe("feddra", {"method.rhoo": 0.5})


@pytest.mark.parametrize("sites", [{"num_clients": 3}, {"num_clients": 1}, {"clients": ["a", "b"]}])
def test_an_environment_with_other_sites_is_refused_before_it_runs(tmp_path: Path, sites: dict[str, Any]) -> None:
    from nvflare.recipe import SimEnv

    with pytest.raises(ValueError, match="the job is for site-1, site-2") as refused:
        FedVLPRecipe("fedavg", SETTINGS).execute(SimEnv(**sites, workspace_root=str(tmp_path)))
    assert str(refused.value).startswith("SimEnv has the sites ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("env", [SimpleNamespace(num_clients=2, clients=None), SimpleNamespace()])
def test_an_environment_with_the_jobs_sites_or_none_of_its_own_is_taken(env: Any) -> None:
    refuse_other_sites(env, ("site-1", "site-2"))


@pytest.mark.slow
def test_it_runs_in_simenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvflare.recipe import SimEnv

    monkeypatch.setenv("FEDVLP_HOME", str(tmp_path / "results"))
    FedVLPRecipe("fedavg", SETTINGS).execute(SimEnv(num_clients=2, workspace_root=str(tmp_path / "workspace")))
    assert RunFolder(tmp_path / "results" / "fedavg" / "001").model.exists()
