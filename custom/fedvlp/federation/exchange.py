"""Runs a federation in this process (sites in turn) or in forked workers (side by side): same bytes either way."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedvlp.core.aggregation import in_site_order
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, State, Update, header
from fedvlp.federation.frames import Frame, Shared, frame, receive, send
from fedvlp.federation.site import failure
from fedvlp.federation.wire import Answering
from fedvlp.training.local_training import Aborted
from fedvlp.training.settings import take_gpu

MakeSite = Callable[[str], Answering]


def answer(site: Answering, message: Broadcast) -> Reply:
    """The site's update, or why there is none (an abort goes through)."""
    try:
        return site.handle(message)
    except Aborted:
        raise
    except Exception as error:
        return failure(error)


class SequentialExchange:
    """An exchange that trains one site after the other in this process; an update is read before the next begins."""

    def __init__(self, make_site: MakeSite) -> None:
        self._make = make_site
        self._sites: dict[str, Answering] = {}

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for name, message in messages.items():
            if name not in self._sites:
                self._sites[name] = self._make(name)
            yield name, answer(self._sites[name], message)

    def close(self) -> None:
        """Nothing to stop."""


def headed(message: Broadcast | Update) -> bytes:
    """All of a message but its tensors, as JSON: no pickle."""
    return json.dumps(header(message)).encode()


def joined(kind: type[Any], plain: bytes, state: State, aux: State) -> Any:
    """The Broadcast or Update of these parts."""
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(plain).items()}
    return kind(**values, state=state, aux=aux)


class WorkerPool:
    """An exchange over worker processes forked after import; site i always belongs to worker i modulo their number.

    Fork before this process computes anything on several threads. A worker that dies costs its site this phase and
    is replaced. Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, make_site: MakeSite, sites: tuple[str, ...], workers: int, spool: Path | None = None) -> None:
        self._make = make_site
        self._spool = spool  # where the files of large messages are, and updates wait for their turn
        self._owner = {site: index % workers for index, site in enumerate(sites)}
        self._workers: dict[int, tuple[Any, Connection]] = {}
        self._context = multiprocessing.get_context("fork")
        for index in range(min(workers, len(sites))):
            self._start(index)

    def _start(self, index: int) -> Connection:
        ours, theirs = self._context.Pipe()
        inherited = [connection for _, connection in self._workers.values()] + [ours]
        process = self._context.Process(
            target=_serve, args=(index, self._make, theirs, inherited, self._spool), daemon=True
        )
        process.start()
        theirs.close()
        self._workers[index] = (process, ours)
        return ours

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        return in_site_order(self._replies(messages), list(messages), self._spool)

    def _replies(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        queues: dict[int, list[str]] = {}
        for site in messages:
            queues.setdefault(self._owner[site], []).append(site)
        framed: dict[int, Frame] = {}  # tensors that several sites are sent are framed once
        busy: dict[Any, tuple[int, str]] = {}

        def next_task(index: int) -> None:
            if queues.get(index):
                site = queues[index].pop(0)
                message = messages[site]
                if id(message.state) not in framed:
                    framed[id(message.state)] = frame(message.state, self._spool)
                connection = self._workers[index][1]
                busy[connection] = (index, site)
                aux = frame(message.aux, self._spool)
                self._send(connection, site, headed(message), framed[id(message.state)], aux)
                _close(aux)

        try:
            # Each worker has one task at a time, and its next one as soon as it has answered.
            for index in queues:
                next_task(index)
            while busy:
                for ready in wait(list(busy)):
                    index, site = busy.pop(ready)
                    yield site, self._receive(index)
                    next_task(index)
        finally:
            for sent in framed.values():
                _close(sent)

    @staticmethod
    def _send(connection: Connection, site: str, plain: bytes, *frames: Frame) -> None:
        try:
            connection.send_bytes(site.encode())
            connection.send_bytes(plain)
            for sent in frames:
                send(connection, sent)
        except ConnectionError:
            pass  # the worker died: reading its answer says so

    def _receive(self, index: int) -> Reply:
        process, connection = self._workers[index]
        try:
            status = connection.recv_bytes().decode()
            if status != "update":
                return Failure(FailureKind(status), connection.recv_bytes().decode())
            update: Update = joined(Update, connection.recv_bytes(), receive(connection), receive(connection))
            return update
        except (EOFError, ConnectionResetError):
            process.join()
            connection.close()
            del self._workers[index]
            self._start(index)
            # The site is lost for this phase alone: a new worker has taken the place.
            text = f"its worker process ended with exit code {process.exitcode} and was replaced"
            return Failure(FailureKind.LOST, text)

    def close(self) -> None:
        """Ends the workers."""
        for process, connection in self._workers.values():
            connection.close()
            process.terminate()
            process.join()
        self._workers.clear()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(sent: Frame) -> None:
    if isinstance(sent, Shared):
        sent.close()


def _serve(
    index: int, make_site: MakeSite, connection: Connection, inherited: list[Connection], spool: Path | None
) -> None:
    """A worker's life: answers tasks until the other end closes."""
    take_gpu(index)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    sites: dict[str, Answering] = {}
    with contextlib.suppress(EOFError, OSError):  # the other end is gone, in the middle of a message if it was killed
        while True:
            name = connection.recv_bytes().decode()
            message = joined(Broadcast, connection.recv_bytes(), dict(receive(connection)), dict(receive(connection)))
            try:
                if name not in sites:
                    sites[name] = make_site(name)
                update = sites[name].handle(message)
                plain, frames = headed(update), [frame(tensors, spool) for tensors in (update.state, update.aux)]
                del update
            except Exception as error:
                failed = failure(error)
                connection.send_bytes(failed.kind.value.encode())
                connection.send_bytes(failed.text.encode())
                continue
            connection.send_bytes(b"update")
            connection.send_bytes(plain)
            for sent in frames:
                send(connection, sent)
                _close(sent)
            del message, frames, sent
