"""The records of a run beside its checkpoint: they only grow, and what belongs to a checkpoint is what it says."""

from __future__ import annotations

import errno
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy import Fuse, World, forked, same_bytes

from fedvlp.core import history
from fedvlp.core.checkpoint import CheckpointError
from fedvlp.core.history import Written
from fedvlp.core.method import Method
from fedvlp.core.server_state import Server
from fedvlp.federation.loop import Rounds

RECORDS = [{"round": n, "sites": {"a": {"loss/\n\u00e4": n / 3}}, "memory": math.inf} for n in range(4)]
FOUR_ROUNDS = Rounds(rounds=4, evaluate_every=0)


def without_clock(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in ("seconds", "sites")} for r in records]


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "run" / "history.jsonl"
    first = history.append(file, Written(), RECORDS[:3])
    assert history.read(file, first) == RECORDS[:3]
    second = history.append(file, first, RECORDS[3:])
    assert history.read(file, second) == RECORDS
    assert history.read(file, first) == RECORDS[:3], "an earlier checkpoint has its own part"
    assert second.records == len(file.read_bytes().splitlines()) == 4
    assert second.size == file.stat().st_size
    assert history.append(file, second, []) == second


def test_the_digest_by_hand() -> None:
    """SHA-256 of "a\\n", and of its digits followed by "b\\n" (sha256sum)."""
    one = Written().with_line(b"a\n")
    assert one == Written(1, 2, "87428fc522803d31065e7bce3cf03fe475096631e5e07bbd7a0fde60c4cf25c7")
    assert one.with_line(b"b\n") == Written(2, 4, "4ccf96fdada10b5e2abfc08eb7376b6484355f0002b64b67a9fd30411cacebc0")


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    """A later record costs its own bytes, in the history and in the checkpoint, however many there are before it."""
    path, server = tmp_path / "server.safetensors", Server(("a",), {"w": torch.zeros(1)})
    sizes = []
    for number in range(300):
        server.history.append({"round": number % 10, "sites": {"a": {"loss/x": 0.5}}})
        before = server.written.size
        server.save(path, 0)
        sizes.append((path.stat().st_size, server.written.size - before))
    assert max(sizes)[0] - min(sizes)[0] <= 8, "but for the digits of the count, and safetensors' alignment"
    assert {grown for _, grown in sizes} == {sizes[0][1]}


@pytest.mark.parametrize("surplus", [b"x", b'{"round": 9}\n', b"half a line", b"\x00" * 5000])
def test_what_a_kill_left_beyond_the_checkpoint_is_cut(tmp_path: Path, surplus: bytes) -> None:
    file = tmp_path / "history.jsonl"
    kept = history.append(file, Written(), RECORDS[:2])
    whole = tmp_path / "whole.jsonl"
    last = history.append(whole, Written(), RECORDS)
    with open(file, "ab") as handle:
        handle.write(surplus)
    assert history.read(file, kept) == RECORDS[:2]
    assert history.append(file, kept, RECORDS[2:]) == last
    assert file.read_bytes() == whole.read_bytes()


def test_a_new_run_in_an_old_folder_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    history.append(file, Written(), RECORDS)
    now = history.append(file, Written(), RECORDS[:1])
    assert file.stat().st_size == now.size


def test_missing_lines_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    kept = history.append(file, Written(), RECORDS)
    file.write_bytes(file.read_bytes()[:-1])
    said = rf"history\.jsonl in .* has {kept.size - 1:,} bytes; .* belongs to 4 records of {kept.size:,} bytes"
    with pytest.raises(CheckpointError, match=said):
        history.read(file, kept)
    with pytest.raises(CheckpointError, match=said):
        history.append(file, kept, RECORDS)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has 0 bytes; .* belongs to 4 records"):
        history.read(file, kept)
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        history.append(file, kept, RECORDS)
    assert not file.exists(), "nothing is made up"


def test_changed_lines_are_an_error(tmp_path: Path) -> None:
    """One digit, at the same length, anywhere; and lines that changed places."""
    file = tmp_path / "history.jsonl"
    kept = history.append(file, Written(), RECORDS)
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    for other in (content.replace(b'"round": 0', b'"round": 7'), b"".join([lines[1], lines[0], *lines[2:]])):
        assert len(other) == len(content)
        file.write_bytes(other)
        with pytest.raises(CheckpointError, match=r"does not hold the 4 records .* restore both from one copy"):
            history.read(file, kept)


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "Permission denied")])
def test_a_disk_that_takes_no_more_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    file = tmp_path / "history.jsonl"
    kept = history.append(file, Written(), RECORDS[:2])

    def full(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=rf"cannot write history\.jsonl in .*: {said}; it needs [\d,]+ bytes"):
            history.append(file, kept, RECORDS[2:])
    assert history.read(file, kept) == RECORDS[:2]
    history.append(file, kept, RECORDS[2:])


def test_what_is_synced_is_all_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the checkpoint could survive a loss of power, and its records not."""
    file, synced, sync = tmp_path / "history.jsonl", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), sync(handle)))
    first = history.append(file, Written(), RECORDS[:1])
    second = history.append(file, first, RECORDS[1:])
    assert synced == [first.size, second.size]


def test_a_file_that_cannot_be_read_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"cannot read {tmp_path.name} in .*: it is no regular file"):
        history.read(tmp_path, Written(1, 2))


# Of a server


def test_a_kept_checkpoint_goes_back_to_its_own_history(tmp_path: Path) -> None:
    """A copy of an earlier checkpoint in the place of the last one: surplus records are cut when the run goes on."""
    whole = world_of(tmp_path / "whole")
    expected = whole.run()
    one = world_of(tmp_path / "one")
    kept: list[bytes] = []
    checkpoint = one.checkpoint
    assert checkpoint is not None
    one.run(report=lambda record: kept.append(checkpoint.read_bytes()))
    checkpoint.write_bytes(kept[1])
    back, _ = Server.load(checkpoint)
    assert [record["round"] for record in back.history] == [0, 1]
    again = one.run()
    same_bytes(again.state, expected.state)
    assert without_clock(again.history) == without_clock(expected.history)
    assert without_clock(Server.load(checkpoint)[0].history) == without_clock(expected.history)


def world_of(folder: Path) -> World:
    return World(Method(local_steps=1), rounds=FOUR_ROUNDS, folder=folder)


def test_killed_between_history_and_checkpoint_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL when the lines are synced and the checkpoint is not yet renamed, in each of the four rounds."""
    expected = world_of(tmp_path / "whole").run()
    for moment in range(1, 5):
        one = world_of(tmp_path / str(moment))

        def killed(one: World = one, moment: int = moment) -> None:
            fuse, rename = Fuse(moment), os.replace
            os.replace = lambda *a: (fuse(), rename(*a))  # type: ignore[assignment, func-returns-value]
            one.run()

        assert forked(killed) == -signal.SIGKILL
        assert one.folder is not None
        lines = (one.folder / history.FILE).read_bytes().splitlines()
        assert len(lines) == moment, "one line more than the checkpoint knows of"
        seen = one.run()
        same_bytes(seen.state, expected.state)
        assert without_clock(seen.history) == without_clock(expected.history)
        assert len((one.folder / history.FILE).read_bytes().splitlines()) == 4
