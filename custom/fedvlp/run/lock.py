"""One writer a run folder: the second is told who the first is. The kernel lets go of the lock of a killed process."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from io import TextIOWrapper
from pathlib import Path
from stat import S_ISREG

from fedvlp.core.site_error import UNWRITABLE

FILE = "writer.lock"
LONGEST = 1000  # characters of it that are read
_held: set[TextIOWrapper] = set()
_told_forks = False


class FolderInUseError(ValueError):
    """Another process writes the run's folder; the message says which one, and since when."""


@contextmanager
def only_writer(folder: Path, patience: float = 0.0, what: str = "") -> Iterator[None]:
    """Makes this process the only one that writes the run in ``folder``, which is made where it is not there.

    ``what``: what is in the folder, if it is no run.

    Raises FolderInUseError when another still does after ``patience`` seconds, and OSError where no file can be
    written. The file of the lock stays: whether somebody holds it is known to the kernel alone, so what a killed
    process left in it bars nobody.
    """
    _let_forks_go()
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder, "a+", os.O_CREAT | os.O_APPEND | os.O_RDWR) as handle:
        until = time.monotonic() + patience
        while not _taken(handle):
            if time.monotonic() >= until:
                raise FolderInUseError(
                    f"{what or _run(folder)} is in use: {_holder(handle)}; wait for it to end or end it, then try again"
                )
            time.sleep(0.2)
        handle.truncate(0)
        now = datetime.now(timezone.utc)
        json.dump(
            {"process": os.getpid(), "host": socket.gethostname(), "since": f"{now:%Y-%m-%d %H:%M:%S} UTC"}, handle
        )
        handle.flush()
        _held.add(handle)
        try:
            yield
        finally:
            _held.discard(handle)


def in_use(folder: Path) -> str:
    """Who writes the run in ``folder``; "" where nobody does."""
    try:
        with _opened(folder, "r", os.O_RDONLY) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder(handle)
            except OSError:  # a disk without locks, where nobody can hold one
                return ""
    except FileNotFoundError:
        pass
    return ""


def _run(folder: Path) -> str:
    return f"run {folder.parent.name}/{folder.name}"


def _opened(folder: Path, mode: str, flags: int) -> TextIOWrapper:
    """The lock's file. Raises FolderInUseError for a link, a pipe or a device: what it leads to would be cut."""
    try:
        descriptor = os.open(folder / FILE, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        raise
    except OSError as error:
        if flags & os.O_CREAT and error.errno in UNWRITABLE:
            raise
        raise _strange(folder, error.strerror or "") from None
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _strange(folder, "it is no regular file")
    return open(descriptor, mode, encoding="utf-8")  # type: ignore[return-value]  # text modes alone


def _strange(folder: Path, why: str) -> FolderInUseError:
    return FolderInUseError(
        f"{_run(folder)}: {FILE} cannot be locked ({why}); a run's lock is a file of its own. "
        "See who put it there, and remove it"
    )


def _taken(handle: TextIOWrapper) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise FolderInUseError(
            f"the disk of this folder has no file locks ({error.strerror}), so two processes could write one run; keep "
            "runs on another disk (--runs FOLDER), or mount this one with locks (Lustre: -o flock; NFS: with its lock "
            "manager running)"
        ) from None
    return True


def _holder(handle: TextIOWrapper) -> str:
    """Who holds the lock, as that process wrote it."""
    handle.seek(0)
    try:
        said = json.loads(handle.read(LONGEST))
        return f"process {said['process']} on {said['host']} has been writing it since {said['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):  # it has only just begun
        return "another process has just begun to write it"


def _let_forks_go() -> None:
    """A forked process shares its parent's lock; workers that outlive a killed parent must not hold it."""
    global _told_forks
    if not _told_forks:
        os.register_at_fork(after_in_child=_close_all)
        _told_forks = True


def _close_all() -> None:
    """In a fork: closing its copy of the file leaves the parent's lock as it is."""
    while _held:
        _held.pop().close()
