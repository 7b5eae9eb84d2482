"""A full disk, in words: which one, how much is free there, how much is missing."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

NUMBERS = (errno.ENOSPC, errno.EDQUOT)
TEXTS = tuple(os.strerror(number) for number in NUMBERS)
"""Libraries that are not written in Python, as safetensors, have the system's text in theirs and no number."""


def is_full(error: BaseException | None) -> bool:
    """Whether the error, or one that it came of, is that a disk or a quota is used up."""
    while error is not None:
        if getattr(error, "errno", None) in NUMBERS or any(text in _text(error) for text in TEXTS):
            return True
        error = error.__cause__
    return False


def _text(error: BaseException) -> str:
    """What an error says; "" where it is of a class that cannot even say it."""
    try:
        return str(error)
    except Exception:  # any, of a foreign class
        return ""


def free_space(folder: Path, needed: int = 0) -> str:
    """How many bytes are free on which disk, and how many of ``needed`` are missing.

    ``folder`` need not exist. What is free is what this account may use.
    """
    mount, system = _disk(folder)
    free = system.f_bavail * system.f_frsize
    said = f"{free:,} bytes are free on {mount}"
    if needed > free:
        return f"{said}, {needed - free:,} are missing"
    if system.f_files and not system.f_favail:
        return f"{said}, but it has as many files as it can"
    return f"{said} by now; if that is enough, a quota of this account is used up" if needed else said


def _disk(folder: Path) -> tuple[Path, os.statvfs_result]:
    """Where the disk of a folder is mounted, and what the system says of it."""
    mount = folder.absolute()
    while not mount.exists():
        mount = mount.parent
    system = os.statvfs(mount)
    while not mount.is_mount():
        mount = mount.parent
    return mount, system


def fullest(folders: Iterable[Path]) -> str:
    """That the disk is full, where nobody said which: the one of ``folders`` that has the least free space."""
    free = {}
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # no path of this machine
            _, system = _disk(folder)
            free[folder] = system.f_bavail * system.f_frsize
    least = min(free, key=free.__getitem__)
    return f"the disk is full: {least.absolute()}: {free_space(least)}. Free space there, then do the same again"
