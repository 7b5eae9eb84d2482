"""A visit's way to the trainer of its simulator: finds it, starts it where there is none, asks it.

The trainer is found by the process of the simulator, whose number and start name a folder that is this user's alone.
A visit holds that folder's lock while it talks; one that finds it locked does its work by itself. Nothing is pickled:
a message is JSON and tensors in safetensors' format.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from fedvlp.flare.raw_tensors import RawTensor, packed, unpacked

SOCKET, LOCK = "socket", "lock"
STARTS = 20.0
"""Seconds in which a trainer opens its socket, which it does before it imports anything heavy."""

LONGEST = 100
"""Most characters of a socket's path that every system takes."""


class TrainerLostError(RuntimeError):
    """There is no trainer to be asked, or it ended before it had answered."""


@dataclass(frozen=True)
class Answer:
    """What the trainer says: an update with its tensors, why there is none, or that the task was aborted."""

    update: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, RawTensor] = field(default_factory=dict)
    behind: dict[str, Any] | None = None
    failure: tuple[str, str] | None = None
    aborted: bool = False


def started_at(process: int) -> str | None:
    """When a process started, in ticks of the machine; None where it is gone, or the system does not tell."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # what stands before may hold spaces: the name of the program
    return None if fields[0] in "ZX" else fields[19]


def of_this_simulator() -> TrainerLink | None:
    """The link of the simulator that started this process; None where there can be none."""
    parent = os.getppid()
    started = started_at(parent)
    # The simulator gives each of its groups of GPUs to other processes, and so to another trainer.
    devices = hashlib.blake2b(os.environ.get("CUDA_VISIBLE_DEVICES", "").encode(), digest_size=3).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"fedvlp-trainer-{os.getuid()}-{parent}-{started}-{devices}"
    if started is None or len(str(folder / SOCKET)) > LONGEST:
        return None
    return TrainerLink(folder, parent, started)


def _own(folder: Path) -> bool:
    """Makes the folder where it is missing, and says whether it is this user's and nobody else may look into it."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700


def send(connection: Connection, content: dict[str, Any], tensors: Mapping[str, RawTensor]) -> None:
    """One message."""
    connection.send_bytes(json.dumps(content).encode())
    connection.send_bytes(packed(tensors))


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, RawTensor]]:
    """What :func:`send` sent. Raises EOFError or OSError where the other end is gone, ValueError for another thing."""
    content = json.loads(connection.recv_bytes())
    return content, unpacked(connection.recv_bytes())


class TrainerLink:
    """The way to the trainer whose folder is ``folder``, for as long as the process ``parent`` lives."""

    def __init__(self, folder: Path, parent: int, started: str) -> None:
        self.folder = folder
        self.parent = parent
        self.started = started

    def ask(self, content: dict[str, Any], tensors: Mapping[str, RawTensor], should_stop: Callable[[], bool]) -> Answer:
        """The trainer's answer. Raises TrainerLostError where there is none."""
        with self._alone():
            try:
                with self._connected() as connection:
                    send(connection, content, tensors)
                    while not connection.poll(0.1):
                        if should_stop():
                            return Answer(aborted=True)  # the trainer sees that this end is closed
                    said, state = receive(connection)
            except (EOFError, OSError, subprocess.SubprocessError) as error:
                raise TrainerLostError(f"the trainer ended before it had answered ({type(error).__name__})") from None
        failure = said.get("failure")
        return Answer(
            said.get("update", {}), state, said.get("behind"), tuple(failure) if failure else None, said["aborted"]
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the lock of the trainer. Raises TrainerLostError where another visit has it."""
        if not _own(self.folder):
            raise TrainerLostError("no folder of the trainer's is this user's alone")
        try:
            lock = (self.folder / LOCK).open("w")
        except OSError:
            raise TrainerLostError("the trainer's folder is gone") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise TrainerLostError("the trainer works for another site") from None
            yield

    def _connected(self) -> Connection:
        """A connection to the trainer, which is started where nobody listens. Raises OSError where that fails.

        What is started opens its socket and ends; the trainer is a process of nobody's, for FLARE kills all children of
        a visit with it.
        """
        address = str(self.folder / SOCKET)
        with contextlib.suppress(OSError):
            return Client(address, "AF_UNIX")
        (self.folder / SOCKET).unlink(missing_ok=True)  # of one that died
        subprocess.run(
            [sys.executable, "-m", "fedvlp.flare.trainer", str(self.folder), str(self.parent), self.started],
            stdin=subprocess.DEVNULL, check=True, timeout=STARTS,
        )  # fmt: skip
        return Client(address, "AF_UNIX")
