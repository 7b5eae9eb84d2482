"""Kept checkpoints as files: which are kept, which make way, what a restore leaves. Runs: run/test_rollback.py."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedvlp.core import snapshots as module
from fedvlp.core.checkpoint import CheckpointError
from fedvlp.core.snapshots import Snapshots


def write(snapshots: Snapshots, text: str) -> None:
    """Replaces the checkpoint, as a save does."""
    temporary = snapshots.checkpoint.with_name("new")
    temporary.write_text(text)
    temporary.replace(snapshots.checkpoint)


def kept(folder: Path, *rounds: int) -> Snapshots:
    """Snapshots of these rounds, each with its name as content, and a checkpoint that is beyond them."""
    snapshots = Snapshots(folder / "server.safetensors")
    for round in rounds:
        write(snapshots, f"round {round}")
        snapshots.store(round)
    write(snapshots, "newest")
    return snapshots


def contents(snapshots: Snapshots) -> dict[int, str]:
    return {round: snapshots.file(round).read_text() for round in snapshots.rounds()}


def full(*given: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_last_five_are_kept(tmp_path: Path) -> None:
    assert contents(kept(tmp_path, *range(8))) == {round: f"round {round}" for round in (3, 4, 5, 6, 7)}


def test_a_round_that_begins_again_replaces_what_was_kept_of_it_and_after_it(tmp_path: Path) -> None:
    snapshots = kept(tmp_path, 1, 2, 3, 4)
    write(snapshots, "again")
    snapshots.store(2)
    assert contents(snapshots) == {1: "round 1", 2: "again"}


def test_what_is_put_back_is_the_newest_and_nothing_else_stays(tmp_path: Path) -> None:
    snapshots = kept(tmp_path, 1, 2, 3)
    for _ in range(2):  # the second time it is in place already
        snapshots.restore(2)
        assert snapshots.checkpoint.read_text() == "round 2"
        assert contents(snapshots) == {1: "round 1", 2: "round 2"}
        assert {file.name for file in tmp_path.iterdir()} == {"server.safetensors", "rounds"}


@pytest.mark.parametrize("moment", ["link", "rename"])
def test_what_cannot_be_put_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Neither a link nor room for a copy; or room, and no rename."""
    snapshots = kept(tmp_path, 1, 2)
    if moment == "link":
        monkeypatch.setattr(os, "link", full)
        monkeypatch.setattr(shutil, "copyfile", full)
    else:
        monkeypatch.setattr(module, "replace_durably", full)
    with pytest.raises(CheckpointError, match=r"cannot put back the checkpoint of round 1: No space left on device"):
        snapshots.restore(1)
    assert snapshots.checkpoint.read_text() == "newest"
    assert contents(snapshots) == {1: "round 1", 2: "round 2"}
    assert {file.name for file in tmp_path.iterdir()} == {"server.safetensors", "rounds"}


def test_a_round_that_is_not_kept_cannot_be_put_back(tmp_path: Path) -> None:
    snapshots = kept(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match="cannot put back the checkpoint of round 9: No such file"):
        snapshots.restore(9)
    assert snapshots.checkpoint.read_text() == "newest"
    assert snapshots.rounds() == [1, 2]
