"""A site's privacy.json in real FLARE runs: what the site says holds whatever the job says, and the run shows it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from flare_simulator import simulator

from fedvlp.config import override
from fedvlp.experiment import Experiment
from fedvlp.flare.jobs import write_job
from fedvlp.presets import get
from fedvlp.runs import RunFolder, simulate

pytestmark = pytest.mark.slow

RECEIVED = {"id": "fedvlp_received", "path": "fedvlp.flare.filters.RememberReceived", "args": {}}


def small(name: str, **settings: object) -> Experiment:
    experiment = get(name)
    chosen = {"data.size": 300, "data.sites": 2, "method.local_steps": 2, "training.batch_size": 16, **settings}
    for key, value in chosen.items():
        experiment = override(experiment, key, str(value))
    return experiment


def run(folder: Path, job: Path, policy: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """`nvflare simulator` with ``policy`` as every site's privacy.json; results land in ``folder/runs``."""
    local = folder / "workspace" / "local"
    local.mkdir(parents=True)
    (local / "privacy.json").write_text(json.dumps(policy))
    return simulator(job, folder, 2)


def policy(results: list[dict[str, Any]], tasks: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    scope = {"name": "default", "properties": {}, "task_data_filters": list(tasks), "task_result_filters": results}
    return {"scopes": [scope], "default_scope": "default", "components": [RECEIVED]}


def rule(name: str, **args: Any) -> dict[str, Any]:
    return {"path": f"fedvlp.flare.{name}", "args": args}


def test_a_policy_that_changes_nothing_gives_the_same_bytes(tmp_path: Path) -> None:
    experiment = small("feddra", **{"rounds.rounds": 1, "method.align_steps": 2})
    engine = RunFolder.create(tmp_path / "engine", experiment)
    simulate(experiment, engine)
    done = run(tmp_path, write_job(experiment, tmp_path / "job"), policy([rule("filters.AllowMetrics", names=["*"])]))
    assert done.returncode == 0, done.stdout[-3000:]
    assert RunFolder(tmp_path / "runs" / "feddra" / "001").model.read_bytes() == engine.model.read_bytes()
