"""The recipe exports the very job that the CLI writes, and runs in FLARE's simulation environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedvlp.flare.jobs import job_files
from fedvlp.flare.recipe import FedVLPRecipe
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


@pytest.mark.slow
def test_it_runs_in_simenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvflare.recipe import SimEnv

    monkeypatch.setenv("FEDVLP_HOME", str(tmp_path / "results"))
    FedVLPRecipe("fedavg", SETTINGS).execute(SimEnv(num_clients=2, workspace_root=str(tmp_path / "workspace")))
    assert RunFolder(tmp_path / "results" / "fedavg" / "001").model.exists()
