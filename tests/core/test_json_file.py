"""JSON files of others: small, shallow, regular files and no links; every reader of such files keeps to that."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fedvlp.core.checkpoint import CheckpointError, load_header, load_tensors
from fedvlp.core.history import Written
from fedvlp.core.history import read as read_history
from fedvlp.core.json_file import DEEPEST, LARGEST_JOB, read_json
from fedvlp.core.tensor_file import TensorFile
from fedvlp.flare.job_check import JobCheck
from fedvlp.flare.job_status import read_status
from fedvlp.flare.jobs import experiment_of
from fedvlp.models.load import load_model
from fedvlp.report.run import Run
from fedvlp.run.folder import RunFolder
from fedvlp.run.listing import listed
from fedvlp.run.simulate import noted_cohort

PLACES = {
    "config.json": [
        lambda path: RunFolder(path.parent).experiment(),
        lambda path: load_model(path.parent),
        lambda path: Run.read(RunFolder(path.parent)),
    ],
    "run_status.json": [lambda path: read_status(path.parent), lambda path: Run.read(RunFolder(path.parent))],
    "environment.json": [lambda path: Run.read(RunFolder(path.parent))],
    "partition.json": [lambda path: noted_cohort(RunFolder(path.parent))],
    "app/config/config_fed_client.json": [lambda path: experiment_of(path.parents[2])],
    "checkpoints/server.safetensors": [load_header, load_tensors, TensorFile],
    "checkpoints/history.jsonl": [lambda path: read_history(path, Written(1, 1, "x"))],
}
KINDS = ("a pipe", "a device", "a folder", "deep", "deep enough for Python", "large")


def put(kind: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    elif kind.startswith("deep"):
        levels = 200_000 if kind == "deep" else DEEPEST + 1
        path.write_text("[" * levels + "]" * levels)
    else:
        with path.open("wb") as file:
            file.truncate(200 << 20)


@pytest.mark.parametrize("place", PLACES)
def test_every_reader_refuses_them_at_once(place: str, tmp_path: Path) -> None:
    """A pipe would be waited for, and /dev/zero read, for ever: this test would not end."""
    for kind in KINDS:
        file = tmp_path / kind / "fedavg" / "001" / place
        put(kind, file)
        for reader in PLACES[place]:
            with pytest.raises((ValueError, OSError, CheckpointError)):
                reader(file)  # type: ignore[operator]
        assert place != "config.json" or [run.state for run in listed(tmp_path / kind)] == ["unreadable"], kind


def test_a_job_that_holds_them_is_refused_by_the_check_of_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobCheck, "_refused", lambda self, app, why: why)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "resources.json").write_text('{"class_allow_list": []}')
    for kind in KINDS:
        put(kind, tmp_path / kind / "app" / "config" / "config_fed_client.json")
        assert JobCheck("client").validate(str(tmp_path / kind / "app"))[0], kind


def test_at_the_bounds_a_file_is_read_and_beyond_them_it_is_not(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("[" * DEEPEST + "]" * DEEPEST)
    assert len(read_json(file)) == 1
    file.write_text(json.dumps("x" * (LARGEST_JOB - 2)))
    assert len(read_json(file, LARGEST_JOB)) == LARGEST_JOB - 2
    file.write_text(json.dumps("x" * (LARGEST_JOB - 1)))
    with pytest.raises(ValueError, match=r"a\.json is no regular file of at most 4,194,304 bytes"):
        read_json(file, LARGEST_JOB)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(ValueError, match="link cannot be read"):
        read_json(tmp_path / "link")
    assert read_json(tmp_path / "link", follow=True)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")
