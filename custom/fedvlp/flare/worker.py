"""The persistent training process: ``python -m fedvlp.flare.worker FOLDER PARENT MADE_OF TASKS``.

FLARE starts a process for every task of a site: its simulator, at fewer threads than sites, and a hospital's job
(flare/executor.py). That process hands its task on (flare/relay.py) to a worker, which keeps what takes seconds to
make: imports, records, tokens, modules. A worker is a cache: what a site remembers is on disk before it answers.

A worker ends with the process ``PARENT``; after so many ``TASKS`` (0: any number); when who asked it is gone; and when
somebody asks for whom it is made of something else. Nothing is pickled: a message is JSON, and files of safetensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedvlp.flare.task_handler import TaskHandler
    from fedvlp.run.assembly import Assembly

SOCKET, LOCK, PROCESS = "socket", "lock", "process"
"""Files in the folder of a worker; the last one holds its number and start."""

STARTS = 20.0
"""Seconds in which a worker opens its socket and takes a task; it imports nothing heavy before."""

BEAT = 0.5
"""Seconds between two signs of life, and between two looks at the parent."""

LONGEST = 95
"""Most characters of a folder's path: that of a socket in it is longer by ten, and no system takes more than 107."""

Files = Mapping[str, Sequence[bytes]]
"""Tensors by name, each as files of safetensors with one piece (flare/tensor_stream.py)."""


class WorkerLostError(RuntimeError):
    """A worker could not be started, or ended or fell silent before it had answered."""


def started_at(process: int) -> str | None:
    """When a process started, in ticks of the machine; None where it is gone, or the system does not tell."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # what stands before may hold spaces: the name of the program
    return None if fields[0] in "ZX" else fields[19]


def worker_of(parent: int, purpose: str, **limits: Any) -> Worker | None:
    """The worker that lives for the process ``parent``; None where it can have no folder that is this user's alone."""
    started = started_at(parent)
    mark = hashlib.blake2b(purpose.encode(), digest_size=3).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"fedvlp-worker-{os.getuid()}-{parent}-{started}-{mark}"
    if started is None or len(str(folder)) > LONGEST:
        return None
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
    return Worker(str(folder), parent, **limits) if own else None


@dataclass(frozen=True)
class Worker:
    """How the workers of the process ``parent`` are found, started and asked; tasks at once have one each.

    Args:
        folder: has a folder for each worker.
        log: file for what a worker writes; "": where this process writes to.
        made_of: a worker that began with something else makes way for another.
        tasks: so does one that has done so many; 0 = any number.
        silence: seconds without a sign of life after which a worker is killed.
    """

    folder: str
    parent: int
    log: str = ""
    made_of: str = ""
    tasks: int = 0
    silence: float = 120.0

    def ask(
        self, content: dict[str, Any], files: Files, should_stop: Callable[[], bool]
    ) -> tuple[dict[str, Any], Files] | None:
        """The worker's answer to a task; None when asked to stop. Raises WorkerLostError."""
        try:
            with self._free() as slot, self._ready(slot) as connection:
                send(connection, content, files)
                heard = time.monotonic()
                while time.monotonic() - heard < self.silence:
                    if connection.poll(0.1):
                        if said := connection.recv_bytes():
                            return received(connection, said)
                        heard = time.monotonic()
                    if should_stop():
                        return None  # the worker ends when this end is closed
                _kill(slot)
                raise TimeoutError
        except (EOFError, OSError, subprocess.SubprocessError) as error:
            raise WorkerLostError(f"no worker answered ({type(error).__name__})") from None

    @contextlib.contextmanager
    def _free(self) -> Iterator[Path]:
        """The folder of the first worker that nobody else asks meanwhile."""
        for number in itertools.count():
            slot = Path(self.folder) / str(number)
            slot.mkdir(exist_ok=True)
            with (slot / LOCK).open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                yield slot
                return

    def _ready(self, slot: Path) -> Connection:
        """A connection to a worker that takes a task now. Raises OSError where there is none."""
        for _ in range(2):
            connection = self._connected(slot)
            with contextlib.suppress(EOFError, OSError):
                connection.send_bytes(self.made_of.encode())
                if connection.poll(STARTS) and connection.recv_bytes():
                    return connection
            connection.close()  # it was made of something else, was about to end, or hangs
            _kill(slot)
        raise ConnectionError

    def _connected(self, slot: Path) -> Connection:
        """A connection to the worker, which is started where nobody listens. Raises OSError where that fails.

        What is started opens its socket and ends; the worker is a process of nobody's, for FLARE kills all children of
        a process with it.
        """
        address = str(slot / SOCKET)
        with contextlib.suppress(OSError):
            return Client(address, "AF_UNIX")
        Path(address).unlink(missing_ok=True)  # of one that died
        words = [str(slot), str(self.parent), self.made_of, str(self.tasks)]
        command = [sys.executable, "-m", "fedvlp.flare.worker", *words]
        with open(self.log, "ab") if self.log else contextlib.nullcontext() as log:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True, timeout=STARTS)
        return Client(address, "AF_UNIX")


def _kill(slot: Path) -> None:
    """Kill the worker, wait for it to exit, remove its socket."""
    with contextlib.suppress(OSError, ValueError):
        number, started = (slot / PROCESS).read_text(encoding="utf-8").split()
        while started_at(int(number)) == started:
            os.kill(int(number), signal.SIGKILL)
            time.sleep(0.01)
    # Its last thread may still hold the socket open, and would take the next connection with it.
    (slot / SOCKET).unlink(missing_ok=True)


def send(connection: Connection, content: dict[str, Any], files: Files) -> None:
    """One message."""
    connection.send_bytes(json.dumps([content, {name: len(pieces) for name, pieces in files.items()}]).encode())
    for piece in itertools.chain.from_iterable(files.values()):
        connection.send_bytes(piece)


def received(connection: Connection, begin: bytes) -> tuple[dict[str, Any], Files]:
    """What :func:`send` sent, ``begin`` being its first part. Raises EOFError or OSError if the peer is gone."""
    content, counts = json.loads(begin)
    return content, {name: [connection.recv_bytes() for _ in range(count)] for name, count in counts.items()}


class Tasks:
    """What a worker keeps between the tasks of a site, or of all sites of one simulator, which share their records."""

    def __init__(self) -> None:
        self._handlers: dict[str, TaskHandler] = {}
        self._assemblies: list[Assembly] = []

    def answer(self, content: dict[str, Any], files: Files) -> tuple[dict[str, Any], Files]:
        """The update and the records behind it, or why there is none."""
        from fedvlp.federation.site import failure
        from fedvlp.flare import child_protocol, messages, tensor_stream
        from fedvlp.flare.task_handler import TaskHandler

        try:
            tensors = {name: tensor_stream.from_files(pieces) for name, pieces in files.items()}
            message, run, experiment, paths, most = child_protocol.task_of(content, tensors)
            key = json.dumps([content["experiment"], content["paths"]])
            if key not in self._handlers:
                self._handlers[key] = TaskHandler(experiment, paths, self._assembly)
            handler = self._handlers[key]
            update = messages.send_update(handler.answer(message, run, lambda: False, most))
            header, tensors = child_protocol.apart(update)
            behind = None if handler.behind is None else asdict(handler.behind)
            named = {name: tensor_stream.to_files(tensor) for name, tensor in tensors.items()}
            return {"update": header, "behind": behind}, named
        except Exception as error:
            failed = failure(error)
            return {"failure": [failed.kind.value, failed.text, failed.public]}, {}

    def _assembly(self, *made_of: Any) -> Assembly:
        """One assembly for all sites that have the same experiment in the same run."""
        from fedvlp.run.assembly import Assembly

        for known in self._assemblies:
            if (known.experiment, known.folder, known.accept_phi_risk) == made_of:
                return known
        self._assemblies.append(Assembly(*made_of))
        return self._assemblies[-1]


def serve(listener: socket.socket, made_of: str, most: int) -> None:
    """Answers one task after the other, until so many are done (0: any number)."""
    tasks = Tasks()
    for _ in range(most) if most else itertools.count():
        with Connection(listener.accept()[0].detach()) as connection:
            if connection.recv_bytes() != made_of.encode():
                return
            connection.send_bytes(b"ready")
            content, files = received(connection, connection.recv_bytes())
            with _signs_of_life(connection):
                said = tasks.answer(content, files)
            send(connection, *said)


@contextlib.contextmanager
def _signs_of_life(connection: Connection) -> Iterator[None]:
    """Sends empty messages meanwhile, and ends this process when who asked is gone: nobody waits for the answer."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT):
            try:
                connection.send_bytes(b"")
            except OSError:
                os._exit(0)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join()


def main(slot: Path, parent: int, made_of: str, most: int) -> None:
    """Serves tasks until the parent process exits."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(slot / SOCKET))
        listener.listen()
        if os.fork():
            os._exit(0)  # who started this may go on: somebody listens
        os.setsid()
        (slot / PROCESS).write_text(f"{os.getpid()} {started_at(os.getpid())}", encoding="utf-8")
        threading.Thread(target=_end_with, args=(slot, parent), daemon=True).start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, with which this process ends
        with contextlib.suppress(EOFError, OSError):  # who asked was killed: the next one starts another worker
            serve(listener, made_of, most)


def _end_with(slot: Path, parent: int) -> None:
    started = started_at(parent)
    while started and started_at(parent) == started and slot.exists():
        time.sleep(BEAT)
    shutil.rmtree(slot.parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
