"""`make poc`: from nothing to a trained model and back to no processes; Ctrl-C on the way leaves none either."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.provisioned import BIN, free_port, processes

from fedvlp.run.folder import RunFolder

pytestmark = pytest.mark.slow(seconds=60)

ROOT = Path(__file__).parents[2]
SMALL = [
    "feddra", "--sites", "2", "--set", "data.size=400", "--set", "rounds.rounds=1", "--set", "method.local_steps=2",
    "--set", "method.align_steps=2", "--set", "training.batch_size=32",  # 64 records behind an update, as sites want
]  # fmt: skip


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """poc/run.sh with a small job, in a folder and on a port of its own, in a process group like a terminal's."""
    own = {
        "POC_FOLDER": str(tmp_path / "poc"), "POC_PORT": str(free_port()), "HOME": str(tmp_path / "home"),
        "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [ROOT / "poc" / "run.sh", *SMALL], cwd=tmp_path, env={**os.environ, **own}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    yield process
    if process.poll() is None:
        process.kill()
    for left in processes(str(tmp_path)):
        left.kill()


def test_a_model_comes_home_and_nothing_is_left(started: subprocess.Popen[str], tmp_path: Path) -> None:
    out, _ = started.communicate(timeout=240)
    assert started.returncode == 0, out
    assert "status FINISHED:COMPLETED" in out
    for site in ("site-1", "site-2"):
        assert re.search(rf"^round \d/1 .*{site} (loss|val R@1) \d", out, re.MULTILINE), "every site's own figures"
    assert re.search(r"feddra .*\d", out), "the table of recall"
    assert out.rstrip().endswith("stopped, no process left")
    assert processes(str(tmp_path)) == []
    model = tmp_path / re.findall(r"^model (\S+)", out, re.MULTILINE)[0]
    assert RunFolder(model.parents[1]).model == model
    assert model.exists()
    assert not (tmp_path / "home").exists(), "the user's own ~/.nvflare is not touched"


def test_ctrl_c_stops_everything(started: subprocess.Popen[str], tmp_path: Path) -> None:
    """Pressed while the job runs."""
    assert started.stdout is not None
    seen = ""
    while "status RUNNING" not in seen:
        line = started.stdout.readline()
        assert line, f"ended before the job ran:\n{seen}"
        seen += line
    assert len(processes(str(tmp_path))) >= 9, "server and sites, each a watchdog, a parent and a job"
    os.killpg(started.pid, signal.SIGINT)
    out, _ = started.communicate(timeout=120)
    assert started.returncode == 130, out
    assert "stopped, no process left" in out
    assert processes(str(tmp_path)) == []
