"""Curves of a run in MLflow: named by site, sent once, gone on with after a stop, and no reason for a run to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedvlp.run.metrics import MLflow

RECORD = {
    "round": 2, "phase": "train", "seconds": 1.5, "dropped": {}, "members": ["site-1"], "bytes": {}, "server": {},
    "memory": {}, "sites": {"site-1": {"loss/contrastive": 0.25, "val/mean/r1": 50.0}},
}  # fmt: skip


class Server:
    """What a tracking server keeps; ``down`` ends every call."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.down = False

    def client(self, tracking_uri: str) -> Any:
        assert tracking_uri == "http://127.0.0.1:5000"
        return self

    def __getattribute__(self, name: str) -> Any:
        if name not in ("down", "runs", "client") and not name.startswith("__") and self.down:
            raise ConnectionError("/patient/path")
        return object.__getattribute__(self, name)

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if self.runs else None

    def create_experiment(self, name: str) -> str:
        assert name == "fedvlp"
        return "7"

    def create_run(self, number: str, run_name: str) -> Any:
        name = f"run-{len(self.runs)}"
        self.runs[name] = {"name": run_name, "status": "", "curves": {}}
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def set_terminated(self, run: str) -> None:
        self.runs[run]["status"] = "FINISHED"

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        for name, value, _, step in metrics:
            self.runs[run]["curves"].setdefault(name, []).append((step, value))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    kept = Server()
    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.MlflowClient = kept.client  # type: ignore[attr-defined]
    entities.Metric = lambda *values: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return kept


def folder(tmp_path: Path) -> Path:
    run = tmp_path / "feddra" / "001"
    run.mkdir(parents=True)
    return run


def test_a_run_and_what_it_goes_on_with_are_one_run_there(server: Server, tmp_path: Path) -> None:
    run = folder(tmp_path)
    for round in (2, 3):
        board = MLflow("http://127.0.0.1:5000", run)
        board({**RECORD, "round": round})
        assert server.runs["run-0"]["status"] == "RUNNING"
        board.close()
    (kept,) = server.runs.values()
    assert (kept["name"], kept["status"]) == ("feddra/001", "FINISHED")
    assert kept["curves"]["site-1/val/mean/r1"] == [(2, 50.0), (3, 50.0)]
    assert kept["curves"]["site-1/loss/contrastive/train"] == [(2, 0.25), (3, 0.25)]
    assert json.loads((run / "mlflow.json").read_text()) == {"http://127.0.0.1:5000": "run-0"}


def test_a_server_that_goes_away_is_a_warning_and_one_that_is_not_there_a_refusal(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = MLflow("http://127.0.0.1:5000", folder(tmp_path))
    server.down = True
    board(RECORD)
    board.close()
    assert "round 2: its curves are not all in MLflow: ConnectionError" in caplog.text
    assert "patient" not in caplog.text
    with pytest.raises(ValueError, match=r"no run can be begun there \(ConnectionError\); give the address"):
        MLflow("http://127.0.0.1:5000", folder(tmp_path / "other"))


def test_without_mlflow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"fedvlp\[mlflow\]"):
        MLflow("http://127.0.0.1:5000", folder(tmp_path))
