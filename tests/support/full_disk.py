"""A file system that really is full: a small tmpfs that only a process forked for it sees.

The kernel itself refuses to write, wherever the code under test does. Where a process may have no mounts of its own,
the test is skipped; that of the limit for a file's size, which every process has, is run everywhere.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18
ROOMY = 64 * 2**20


class SmallDisk:
    """The disk under ``folder``, in the process that :func:`on_small_disk` forked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, spare: int = 0) -> None:
        """From now on it takes ``spare`` bytes more, in whole pages."""
        used = os.statvfs(self.folder)
        room = (used.f_blocks - used.f_bfree) * used.f_frsize + spare
        assert _mount(self.folder, max(room, 4096), MS_REMOUNT)

    def take_nothing(self) -> None:
        """It is read-only, as the kernel makes a disk that fails."""
        assert _mount(self.folder, ROOMY, MS_REMOUNT | MS_RDONLY)

    def make_room(self) -> None:
        """It is as large again as at first."""
        assert _mount(self.folder, ROOMY, MS_REMOUNT)


def on_small_disk(folder: Path, body: Callable[[SmallDisk], Any]) -> Any:
    """What ``body`` returns in a process of its own, in which ``folder`` is a disk of 64 MiB; what it raises fails."""
    value = forked(_on_mount, folder, body)
    if value == NO_MOUNT:
        pytest.skip("a process may have no file system of its own here (unshare and mount are refused)")
    return value


NO_MOUNT = "no mount"


def _on_mount(folder: Path, body: Callable[[SmallDisk], Any]) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return body(SmallDisk(folder)) if _own_namespace() and _mount(folder, ROOMY) else NO_MOUNT


def forked(work: Callable[..., Any], *given: Any) -> Any:
    """What ``work(*given)`` returns in a process of its own; the test fails with what it raises."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(theirs, work, *given))
    process.start()
    theirs.close()
    try:
        well, value = ours.recv()
    except EOFError:
        process.join()
        pytest.fail(f"the forked process ended with {process.exitcode}")
    process.join()
    if not well:
        pytest.fail(value)
    return value


def _in_child(answer: Connection, work: Callable[..., Any], *given: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answer.send((True, work(*given)))
    except BaseException:
        answer.send((False, traceback.format_exc()))


def _own_namespace() -> bool:
    """Whether this process now has mounts of its own: as root alone, else as root of a user namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0 and libc.unshare(CLONE_NEWNS) == 0:
        return bool(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0)
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    return True


def _mount(folder: Path, size: int, flags: int = 0) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, f"size={size}".encode()) == 0)
