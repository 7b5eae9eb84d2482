"""Spec faults, row 35: Ctrl-C of `nvflare simulator` leaves no process behind, and the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.provisioned import BIN, processes, until

from fedvlp.flare.jobs import write_job
from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate


@pytest.mark.slow(seconds=125)
def test_row_35_ctrl_c_ends_all_processes_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """SIGINT reaches the whole process group, as from a terminal, while round 1 is under way."""
    chosen = presets.get("fedavg")
    settings = {"data.size": 300, "data.sites": 2, "rounds.rounds": 2, "method.local_steps": 40,
                "training.batch_size": 8}  # fmt: skip
    for key, value in settings.items():
        chosen = override(chosen, key, str(value))
    engine = RunFolder.create(tmp_path / "engine", chosen)
    simulate(chosen, engine)
    write_job(chosen, tmp_path / "job")
    folder = RunFolder(tmp_path / "runs" / "fedavg" / "001")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [BIN / "nvflare", "simulator", "job", "-t", "2", "-w", "w"]

    def start() -> subprocess.Popen[bytes]:
        log = (tmp_path / "log.txt").open("wb")
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )  # fmt: skip

    simulator = start()
    until(folder.checkpoint.exists, "round 0 is complete")
    os.killpg(simulator.pid, signal.SIGINT)
    assert simulator.wait(60) != 0
    until(lambda: not processes(str(tmp_path)), "no process is left", 30)
    assert 1 <= len(folder.history()) < 3, "interrupted, and what was complete is kept"
    again = start()
    assert again.wait(400) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    assert folder.model.read_bytes() == engine.model.read_bytes()
