"""A process that trains and stays: ``python -m fedvlp.flare.trainer FOLDER PARENT STARTED MADE_OF TASKS``.

FLARE starts a process for every task of a site: its simulator, at fewer threads than sites, and a hospital's job
(flare/executor.py). This one stays, with what it would take them time to make again: imports, cohort, tokens, modules.
It knows nothing that is not on disk: what a site remembers is written before it answers (federation/site.py).

flare/trainer_link.py starts it. It does one task at a time, from a socket in ``FOLDER``, and ends with the process
``PARENT``, which started at ``STARTED``; after so many ``TASKS`` (0: any number); or when it is asked for by somebody
for whom it is made of something else. While nobody asks, it does what it was told will be asked (flare/look_ahead.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvlp.flare.look_ahead import TOLD, LookAhead, Said, Task
from fedvlp.flare.paths import SitePaths
from fedvlp.flare.raw_tensors import RawTensor, raw, with_torch
from fedvlp.flare.trainer_link import CROWDED, PROCESS, READY, SOCKET, receive, send, started_at

if TYPE_CHECKING:
    from fedvlp.flare.task_handler import TaskHandler
    from fedvlp.run.assembly import Assembly
    from fedvlp.run.experiment import Experiment

LOOKS = 0.5
"""Seconds between two looks at the parent."""

AUX = "aux/"


class Trainer:
    """Answers the tasks of a site, or of all sites of one simulator, which share cohort and modules."""

    def __init__(self) -> None:
        self._experiments: dict[str, Experiment] = {}
        self._handlers: dict[tuple[str, SitePaths], TaskHandler] = {}
        self._assemblies: list[Assembly] = []

    def answer(self, task: Task, should_stop: Callable[[], bool]) -> Said:
        """The message for the visit. An error is a message too."""
        from fedvlp.federation.site import failure
        from fedvlp.training.loop import Aborted

        try:
            return self._update(task.asked, task.tensors, should_stop)
        except Aborted:
            return {"aborted": True}, {}
        except Exception as error:
            failed = failure(error)
            return {"failure": [failed.kind.value, failed.text, failed.public], "aborted": False}, {}

    def _update(self, asked: dict[str, Any], tensors: Mapping[str, RawTensor], should_stop: Callable[[], bool]) -> Said:
        from fedvlp.core.types import Broadcast, header

        meta = dict(asked["message"])
        run = meta.pop("run")
        held = with_torch(tensors)
        state = {name: tensor for name, tensor in held.items() if not name.startswith(AUX)}
        aux = {name.removeprefix(AUX): tensor for name, tensor in held.items() if name.startswith(AUX)}
        handler = self._handler(asked["settings"], asked.get("plugins", []), SitePaths(**asked["paths"]))
        update = handler.answer(Broadcast(state=state, aux=aux, **meta), run, should_stop, asked["most_samples"])
        said = {
            "update": {name: value for name, value in header(update).items() if name != "site"},
            "behind": None if handler.behind is None else asdict(handler.behind),
            "aborted": False,
        }
        named = {**update.state, **{AUX + name: tensor for name, tensor in update.aux.items()}}
        return said, {name: raw(tensor) for name, tensor in named.items()}

    def _handler(self, settings: dict[str, Any], brought: list[str], paths: SitePaths) -> TaskHandler:
        from fedvlp.flare.task_handler import TaskHandler
        from fedvlp.run import plugins
        from fedvlp.run.config import from_config
        from fedvlp.run.experiment import Experiment

        text = json.dumps(settings, sort_keys=True)
        for file in brought:
            plugins.use(file)
        if text not in self._experiments:
            self._experiments[text] = Experiment(**{name: from_config(value) for name, value in settings.items()})
        key = text, paths
        if key not in self._handlers:
            self._handlers[key] = TaskHandler(self._experiments[text], paths, self._shared)
        return self._handlers[key]

    def _shared(self, experiment: Experiment, folder: Path, accept_phi_risk: Any) -> Assembly:
        """One assembly for all sites that have the same experiment in the same run."""
        from fedvlp.run.assembly import Assembly

        mine = experiment, folder, accept_phi_risk
        for known in self._assemblies:
            if (known.experiment, known.folder, known.accept_phi_risk) == mine:
                return known
        made = Assembly(*mine)
        made.side_by_side = True  # the simulator waits meanwhile
        self._assemblies.append(made)
        return made


@dataclass
class Visit:
    """Somebody who has connected and said what it wants."""

    connection: Connection
    task: Task


class Service:
    """Answers visits, one after the other; while there is none and the machine ``idles``, what will be asked."""

    def __init__(self, listener: socket.socket, made_of: str, idles: Callable[[], bool]) -> None:
        self._listener = listener
        self._made_of = made_of
        self._idles = idles
        self._trainer = Trainer()
        self._ahead = LookAhead()
        self._early: Visit | None = None  # waits for a task that is being done ahead, or that is to be done instead
        self._over = False  # somebody asked for a trainer that is made of something else
        self._done = 0

    def run(self, tasks: int) -> None:
        """Goes on until so many ``tasks`` are done (0: any number), or another trainer is asked for."""
        while (not tasks or self._done < tasks) and not self._over:
            if not self._waits() and self._idles() and (task := self._ahead.next()):
                self._ahead.store(task, self._trainer.answer(task, partial(self._to_be_left, task)))
                continue
            visit, self._early = self._early or self._next_visit(), None
            if visit is None or self._answered(visit):
                continue
            # Who asks says nothing after that: what can be read then is that it is gone.
            self._say(visit, self._trainer.answer(visit.task, visit.connection.poll))

    def _waits(self) -> bool:
        return self._early is not None or bool(select.select([self._listener], [], [], 0)[0])

    def _next_visit(self) -> Visit | None:
        """Waited for; None where who connected is gone, or asks for another trainer."""
        connection = Connection(self._listener.accept()[0].detach())
        with contextlib.suppress(EOFError, OSError):  # one that was killed
            self._over = connection.recv_bytes() != self._made_of.encode()
            if not self._over:
                connection.send_bytes(READY)
                return Visit(connection, Task(*receive(connection)))
        connection.close()
        return None

    def _answered(self, visit: Visit) -> bool:
        """Whether the visit takes no work, and so is over: it tells of tasks, or its answer is there."""
        if TOLD in visit.task.asked:
            self._ahead.tell(visit.task.asked, visit.task.tensors)
            self._say(visit, ({}, {}))
            return True
        ready = self._ahead.visited(visit.task)
        if ready is not None:
            self._say(visit, ready, ahead=True)
        return ready is not None

    def _to_be_left(self, task: Task) -> bool:
        """Whether ``task``, which is done ahead, is to be left for another; answers visits that take no work."""
        while self._early is None and self._waits():
            visit = self._next_visit()
            if visit is None:
                if self._over:
                    return True
            elif not self._answered(visit):
                self._early = visit
            elif TOLD in visit.task.asked:
                return True  # the task's phase is over
        return self._early is not None and (self._early.task.digest != task.digest or self._early.connection.poll())

    def _say(self, visit: Visit, said: Said, ahead: bool = False) -> None:
        self._done += TOLD not in visit.task.asked
        with visit.connection, contextlib.suppress(OSError):  # one that was killed
            send(visit.connection, {**said[0], TOLD: ahead}, said[1])


def main(folder: Path, parent: int, started: str, made_of: str, tasks: int) -> None:
    """Does tasks until the parent ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET))
        listener.listen()
        if os.fork():
            os._exit(0)  # who started this may go on: somebody listens
        os.setsid()
        (folder / PROCESS).write_text(f"{os.getpid()} {started_at(os.getpid())}", encoding="utf-8")
        threading.Thread(target=_end_with, args=(folder, parent, started), daemon=True).start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, with which this process ends
        Service(listener, made_of, lambda: not (folder / CROWDED).exists()).run(tasks)


def _end_with(folder: Path, parent: int, started: str) -> None:
    while started_at(parent) == started and folder.exists():
        with contextlib.suppress(OSError):
            os.utime(folder / PROCESS)
        time.sleep(LOOKS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
