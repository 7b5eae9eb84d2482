"""Runs a federation in this process (sites in turn) or in forked workers (side by side): same bytes either way."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from fedvlp.core.aggregation import in_site_order
from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, Update, header
from fedvlp.federation.site import failure
from fedvlp.federation.wire import Answers
from fedvlp.training.loop import Aborted

MakeSite = Callable[[str], Answers]


def answer(site: Answers, message: Broadcast) -> Reply:
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
        self._sites: dict[str, Answers] = {}

    def __call__(self, messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
        for name, message in messages.items():
            if name not in self._sites:
                self._sites[name] = self._make(name)
            yield name, answer(self._sites[name], message)

    def close(self) -> None:
        """Nothing to stop."""


def pack(message: Broadcast | Update) -> list[bytes]:
    """A message as [JSON header, safetensors of state, safetensors of aux]: no pickle."""
    return [json.dumps(header(message)).encode(), _tensor_bytes(message.state), _tensor_bytes(message.aux)]


def _tensor_bytes(state: dict[str, torch.Tensor]) -> bytes:
    return save({name: tensor.detach().contiguous() for name, tensor in state.items()}) if state else b""


def unpack(kind: type[Any], frames: list[bytes]) -> Any:
    """The Broadcast or Update that :func:`pack` made."""
    state, aux = (load(frame) if frame else {} for frame in frames[1:])
    plain = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(frames[0]).items()}
    return kind(**plain, state=state, aux=aux)


class WorkerPool:
    """An exchange over worker processes forked after import; site i always belongs to worker i modulo their number.

    Fork before this process computes anything on several threads. A worker that dies costs its site this phase and
    is replaced. Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, make_site: MakeSite, sites: tuple[str, ...], workers: int, spool: Path | None = None) -> None:
        self._make = make_site
        self._spool = spool  # where large updates wait for their turn
        self._owner = {site: index % workers for index, site in enumerate(sites)}
        self._workers: dict[int, tuple[Any, Connection]] = {}
        self._context = multiprocessing.get_context("fork")
        for index in range(min(workers, len(sites))):
            self._start(index)

    def _start(self, index: int) -> Connection:
        ours, theirs = self._context.Pipe()
        inherited = [connection for _, connection in self._workers.values()] + [ours]
        process = self._context.Process(target=_serve, args=(self._make, theirs, inherited), daemon=True)
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
        packed: dict[int, bytes] = {}  # tensors that several sites are sent are packed once
        busy: dict[Any, tuple[int, str]] = {}

        def next_task(index: int) -> None:
            if queues.get(index):
                site = queues[index].pop(0)
                message = messages[site]
                if id(message.state) not in packed:
                    packed[id(message.state)] = _tensor_bytes(message.state)
                tensors = [packed[id(message.state)], _tensor_bytes(message.aux)]
                connection = self._workers[index][1]
                busy[connection] = (index, site)
                plain = pack(replace(message, state={}, aux={}))[0]
                self._send(connection, [site.encode(), plain, *tensors])

        for index in queues:
            next_task(index)
        while busy:
            for ready in wait(list(busy)):
                index, site = busy.pop(ready)
                yield site, self._receive(index)
                next_task(index)

    @staticmethod
    def _send(connection: Connection, frames: list[bytes]) -> None:
        try:
            for frame in frames:
                connection.send_bytes(frame)
        except ConnectionError:
            pass  # the worker died: reading its answer says so

    def _receive(self, index: int) -> Reply:
        process, connection = self._workers[index]
        try:
            status = connection.recv_bytes().decode()
            if status != "update":
                return Failure(FailureKind(status), connection.recv_bytes().decode())
            update: Update = unpack(Update, [connection.recv_bytes() for _ in range(3)])
            return update
        except (EOFError, ConnectionResetError):
            process.join()
            connection.close()
            del self._workers[index]
            self._start(index)
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


def _serve(make_site: MakeSite, connection: Connection, inherited: list[Connection]) -> None:
    """A worker's life: answers tasks until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    sites: dict[str, Answers] = {}
    with contextlib.suppress(EOFError, OSError):  # the other end is gone, in the middle of a message if it was killed
        while True:
            name = connection.recv_bytes().decode()
            message = unpack(Broadcast, [connection.recv_bytes() for _ in range(3)])
            try:
                if name not in sites:
                    sites[name] = make_site(name)
                reply = [b"update", *pack(sites[name].handle(message))]
            except Exception as error:
                failed = failure(error)
                reply = [failed.kind.value.encode(), failed.text.encode()]
            for frame in reply:
                connection.send_bytes(frame)
