"""Nothing that identifies a patient is written down: the gate before training, and a whole engine run, searched.

A whole FLARE run, with all that it sends: tests/flare/test_smoke.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.planted import found, planted

from fedvlp.core.types import Broadcast
from fedvlp.data.deid import PHIError
from fedvlp.data.sources.table import TableSource
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.task_handler import TaskHandler
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import identity, override
from fedvlp.run.experiment import Experiment
from fedvlp.run.presets import get

BIN = Path(sys.executable).parent


def experiment(table: Path) -> Experiment:
    chosen = get("feddra")
    settings = {
        "rounds.rounds": 1, "method.local_steps": 1, "method.align_steps": 1, "training.batch_size": 4,
        "method.dro_batch": 4,
    }  # fmt: skip
    for key, value in settings.items():
        chosen = override(chosen, key, str(value))
    return Experiment(**{**vars(chosen), "data": TableSource(str(table), image_size=72)})


def test_a_site_answers_only_when_its_own_settings_accept_the_risk(tmp_path: Path) -> None:
    chosen = experiment(planted(tmp_path / "data"))
    (tmp_path / "local").mkdir()
    place = SitePaths("site-1", str(tmp_path / "runs"), str(tmp_path / "local"))
    run = identity(chosen, "feddra/001")
    message = Broadcast(0, "evaluate", Assembly(chosen).server(("site-1",)).state)
    settings = tmp_path / "local" / "fedvlp.json"
    for content in (None, "{}", '{"accept_phi_risk": false}'):
        if content:
            settings.write_text(content)
        with pytest.raises(PHIError, match="record number in 80"):
            TaskHandler(chosen, place).answer(message, run, lambda: False)
    settings.write_text('{"accept_phi_risk": true}')
    assert TaskHandler(chosen, place).answer(message, run, lambda: False).site == "site-1"


@pytest.mark.slow
def test_an_engine_run_names_nobody(tmp_path: Path) -> None:
    table = planted(tmp_path / "site")
    out = tmp_path / "out"
    out.mkdir()
    command = [
        BIN / "fedvlp", "simulate", "feddra", "--data", f"table:{table}", "--workers", "2", "--set", "rounds.rounds=1",
        "--set", "method.local_steps=1", "--set", "method.align_steps=1", "--set", "training.batch_size=4",
    ]  # fmt: skip
    run = {"cwd": out, "capture_output": True, "text": True, "timeout": 300, "check": False}
    blocked = subprocess.run(command, **run)  # type: ignore[call-overload]
    assert blocked.returncode == 2
    assert "record number in 80" in blocked.stderr
    (out / "blocked.txt").write_text(blocked.stdout + blocked.stderr)
    done = subprocess.run([*command, "--accept-phi-risk"], **run)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (out / "output.txt").write_text(done.stdout + done.stderr)
    assert found(out) == []
    assert len(list(out.rglob("*.safetensors"))) >= 2
    assert list(out.rglob("events.out.tfevents*"))
    assert list(out.rglob("report.html"))
