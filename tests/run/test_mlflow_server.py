"""Curves of a run in a real MLflow server on loopback, read back by MLflow's own client."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from fedvlp.cli import app
from fedvlp.run.metrics import MLflow

pytestmark = [
    pytest.mark.slow(seconds=60),
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("mlflow") is None, reason="pip install 'fedvlp[mlflow]'"),
]

SMALL = [
    "--sites", "2", "--workers", "1", "--set", "data.size=200", "--set", "method.local_steps=1",
    "--set", "method.align_steps=1", "--set", "training.batch_size=8", "--set", "rounds.rounds=1",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with a database of its own; files as the store are refused by MLflow 3 and later."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    address = f"http://127.0.0.1:{port}"
    arguments = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'runs.db'}", "--default-artifact-root", str(folder / "artifacts"),
    ]  # fmt: skip
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        wait_for(f"{address}/health", process)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    """Until the server answers; pytest's time limit ends a wait for one that never does."""
    while process.poll() is None:
        try:
            urlopen(address, timeout=10)
            return
        except (URLError, OSError):
            time.sleep(0.5)
    pytest.fail("MLflow's server ended before it answered")


def test_every_figure_of_a_run_is_read_back_and_nothing_twice_after_a_resume(server: str, tmp_path: Path) -> None:
    """metrics.csv is what the run wrote; the server has each of its figures once, at its round."""
    from mlflow import MlflowClient

    run = tmp_path / "feddra" / "001"
    begin = ["simulate", "feddra", *SMALL, "--runs", str(tmp_path)]
    for arguments in (begin, ["simulate", "--resume", str(run)]):
        done = CliRunner().invoke(app, [*arguments, "--mlflow", server], catch_exceptions=False)
        assert done.exit_code == 0
    client = MlflowClient(server)
    (number,) = json.loads((run / "mlflow.json").read_text(encoding="utf-8")).values()
    there = client.get_run(number)
    assert (there.info.run_name, there.info.status) == ("feddra/001", "FINISHED")
    sent = [
        (name, point.step, point.value)
        for name in there.data.metrics
        for point in client.get_metric_history(number, name)
    ]
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        written = [
            (row["site"], row["metric"], row["phase"], int(row["round"]), float(row["value"]))
            for row in csv.DictReader(file)
        ]
    names = {name for name, *_ in sent}
    expected = [
        (name if (name := f"{site}/{metric}/{phase}") in names else f"{site}/{metric}", round, value)
        for site, metric, phase, round, value in written
    ]
    assert len(written) > 100
    assert sorted(sent) == sorted(expected)


def test_where_nobody_listens_it_says_so_without_asking_for_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's client asks seven times, ever more slowly, unless it is told otherwise."""
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="no run can be begun there"):
        MLflow(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"
