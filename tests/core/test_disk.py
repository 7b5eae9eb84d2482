"""A full disk in words: found in any error, with the disk, what is free and what is missing."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError
from support.full_disk import SmallDisk, on_small_disk

from fedvlp.core.disk import free_space, fullest, is_full


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("write failed: Disk quota exceeded"), True),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), False),
        (ValueError("the room is full"), False),
    ],
)
def test_it_is_known_by_number_and_by_text_and_in_what_came_of_it(error: Exception, full: bool) -> None:
    assert is_full(error) == full
    wrapped = RuntimeError("not written")
    wrapped.__cause__ = error
    assert is_full(wrapped) == full


def on_disk(monkeypatch: pytest.MonkeyPatch, free: int, files: int = 9) -> None:
    """So many blocks of 4,096 bytes are free, and so many files."""
    found = SimpleNamespace(f_bavail=free, f_frsize=4096, f_files=100, f_favail=files)
    monkeypatch.setattr(os, "statvfs", lambda path: found)


def test_what_is_missing_is_what_is_needed_less_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 x 4,096 = 12,288 of 190,000: 177,712 are missing. A folder that does not exist yet lies on the disk above."""
    on_disk(monkeypatch, 3)
    assert free_space(Path("/not/there"), 190_000) == "12,288 bytes are free on /, 177,712 are missing"
    assert free_space(Path("/not/there")) == "12,288 bytes are free on /"


def test_where_there_is_room_the_number_of_files_or_a_quota_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(monkeypatch, 3, files=0)
    assert free_space(Path("/"), 7) == "12,288 bytes are free on /, but it has as many files as it can"
    on_disk(monkeypatch, 3)
    assert (
        free_space(Path("/"), 7)
        == "12,288 bytes are free on / by now; if that is enough, a quota of this account is used up"
    )


def test_of_several_places_the_disk_with_the_least_room_is_named(tmp_path: Path) -> None:
    """Words of a command line that are no paths, and one that is too long for one, do no harm."""

    def body(disk: SmallDisk) -> str:
        disk.fill()
        words = ["--set", "a=b", "x" * 5000, "nul\0", str(disk.folder / "new" / "file")]
        return fullest([Path("/"), *map(Path, words)])

    said = on_small_disk(tmp_path / "disk", body)
    there = tmp_path / "disk"
    assert re.fullmatch(
        f"the disk is full: {there}/new/file: (0|4,096) bytes are free on {there}. "
        "Free space there, then do the same again",
        said,
    )
