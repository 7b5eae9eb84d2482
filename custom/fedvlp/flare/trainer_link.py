"""The way to a trainer: finds it, starts it where there is none, asks it.

A trainer is found by the process that it lives for, a simulator's or a site's job, whose number and start name a folder
that is this user's alone. Who asks holds that folder's lock meanwhile, and does without a trainer where it is taken.
Nothing is pickled: a message is JSON and tensors in safetensors' format.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from fedvlp.flare.look_ahead import TOLD, told
from fedvlp.flare.raw_tensors import RawTensor, packed, raw, unpacked

SOCKET, LOCK, PROCESS = "socket", "lock", "process"
"""Files in the folder; the last one holds the trainer's number and start, and is touched as a sign of life."""

CROWDED = "crowded"
"""File in the folder: two processes wanted the trainer at a time, so while nobody asks it the machine does not idle."""

STARTS = 20.0
"""Seconds in which a trainer opens its socket, which it does before it imports anything heavy."""

BUSY = 60.0
"""Seconds in which a trainer is through with the step that it is at, when the one who asked for it is gone."""

READY = b"ready"

LONGEST = 100
"""Most characters of a socket's path that every system takes."""


class TrainerLostError(RuntimeError):
    """There is no trainer to be asked, or, where it has ``begun``, it ended before it had answered."""

    def __init__(self, text: str, begun: bool = False) -> None:
        super().__init__(text)
        self.begun = begun


@dataclass(frozen=True)
class Answer:
    """What the trainer says: an update with its tensors, why there is none, or that the task was aborted."""

    update: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, RawTensor] = field(default_factory=dict)
    behind: dict[str, Any] | None = None
    failure: tuple[str, str, str] | None = None
    aborted: bool = False
    ahead: bool = False  # it was there before it was asked for (flare/look_ahead.py)


def started_at(process: int) -> str | None:
    """When a process started, in ticks of the machine; None where it is gone, or the system does not tell."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # what stands before may hold spaces: the name of the program
    return None if fields[0] in "ZX" else fields[19]


def of_simulator(process: int) -> TrainerLink | None:
    """The link of the simulator in ``process``, which is this one or started it; None where there can be none."""
    # The simulator gives each of its groups of GPUs to other processes, and so to another trainer.
    return of(process, os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def of(parent: int, purpose: str) -> TrainerLink | None:
    """The link to the trainer that lives for the process ``parent``; of several, the one for this ``purpose``."""
    started = started_at(parent)
    mark = hashlib.blake2b(purpose.encode(), digest_size=3).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"fedvlp-trainer-{os.getuid()}-{parent}-{started}-{mark}"
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
    """The way to the trainer whose folder is ``folder``, for as long as the process ``parent`` lives.

    What it writes goes to ``log``; None: where what this process writes goes, which then has no end before its own.
    """

    def __init__(self, folder: Path, parent: int, started: str, log: Path | None = None) -> None:
        self.folder = folder
        self.parent = parent
        self.started = started
        self.log = log

    def ask(
        self,
        content: dict[str, Any],
        tensors: Mapping[str, RawTensor],
        should_stop: Callable[[], bool],
        *,
        made_of: str = "",
        tasks: int = 0,
        silence: float = math.inf,
    ) -> Answer:
        """The trainer's answer. Raises TrainerLostError where there is none.

        A trainer that began with something else than ``made_of``, has done so many ``tasks`` (0: any number) or gives
        no sign of life for ``silence`` seconds makes way for another.
        """
        with self._alone():
            try:
                with self._ready(made_of, tasks, silence) as connection:
                    return self._answer(connection, content, tensors, should_stop, silence)
            except (EOFError, OSError, subprocess.SubprocessError) as error:
                raise TrainerLostError(f"the trainer did not start ({type(error).__name__})") from None

    def tell(self, messages: Mapping[str, tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
        """Tells a trainer that is there what each site will be asked (flare/look_ahead.py): header and tensors.

        Raises TrainerLostError where it cannot be told.
        """
        if not (self.folder / SOCKET).exists():
            return
        content, tensors = told(messages)
        with self._alone():
            try:
                with self._ready("", 0, math.inf) as connection:
                    send(connection, content, {name: raw(tensor) for name, tensor in tensors.items()})
                    receive(connection)
            except (EOFError, OSError, subprocess.SubprocessError) as error:
                raise TrainerLostError(f"the trainer was not told ({type(error).__name__})") from None

    def _answer(
        self,
        connection: Connection,
        content: dict[str, Any],
        tensors: Mapping[str, RawTensor],
        should_stop: Callable[[], bool],
        silence: float,
    ) -> Answer:
        try:
            send(connection, content, tensors)
            sign, since = self._sign_of_life(), time.monotonic()
            while not connection.poll(0.1):
                if should_stop():
                    return Answer(aborted=True)  # the trainer sees that this end is closed
                if (now := self._sign_of_life()) != sign:
                    sign, since = now, time.monotonic()
                elif time.monotonic() - since > silence:
                    self._kill()
            said, state = receive(connection)
        except (EOFError, OSError) as error:
            text = f"the trainer ended before it had answered ({type(error).__name__})"
            raise TrainerLostError(text, begun=True) from None
        failure = said.get("failure")
        return Answer(
            said.get("update", {}), state, said.get("behind"), tuple(failure) if failure else None, said["aborted"],
            said.get(TOLD, False),
        )  # fmt: skip

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the lock of the trainer. Raises TrainerLostError where somebody else has it."""
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
                with contextlib.suppress(OSError):
                    (self.folder / CROWDED).touch()
                raise TrainerLostError("the trainer works for another site") from None
            yield

    def _ready(self, made_of: str, tasks: int, silence: float) -> Connection:
        """A connection to a trainer that takes a task now. Raises OSError where there is none."""
        for _ in range(2):
            connection = self._connected(made_of, tasks)
            try:
                connection.send_bytes(made_of.encode())
                if connection.poll(min(silence, BUSY)) and connection.recv_bytes() == READY:
                    return connection
            except (EOFError, OSError):
                pass
            connection.close()  # it was made of something else, or hangs in a task that nobody waits for any more
            self._kill()
        raise ConnectionError("it takes no task")

    def _connected(self, made_of: str, tasks: int) -> Connection:
        """A connection to the trainer, which is started where nobody listens. Raises OSError where that fails.

        What is started opens its socket and ends; the trainer is a process of nobody's, for FLARE kills all children of
        a process with it.
        """
        address = str(self.folder / SOCKET)
        with contextlib.suppress(OSError):
            return Client(address, "AF_UNIX")
        (self.folder / SOCKET).unlink(missing_ok=True)  # of one that died
        lives_for = [str(self.folder), str(self.parent), self.started]
        command = [sys.executable, "-m", "fedvlp.flare.trainer", *lives_for, made_of, str(tasks)]
        with contextlib.nullcontext() if self.log is None else self.log.open("ab") as log:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True, timeout=STARTS)
        return Client(address, "AF_UNIX")

    def _sign_of_life(self) -> int:
        """What differs after every sign of life. It is compared with no clock of this process: that may be put."""
        try:
            return (self.folder / PROCESS).stat().st_mtime_ns
        except OSError:
            return 0

    def _kill(self) -> None:
        """Ends the trainer, waits until it is gone, and takes its socket away."""
        with contextlib.suppress(OSError, ValueError):
            number, started = (self.folder / PROCESS).read_text(encoding="utf-8").split()
            while started_at(int(number)) == started:
                os.kill(int(number), signal.SIGKILL)
                time.sleep(0.01)
        # Its last thread may still hold the socket open, and would take the next connection with it.
        (self.folder / SOCKET).unlink(missing_ok=True)
