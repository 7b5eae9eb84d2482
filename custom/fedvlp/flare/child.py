"""The training child of a site: ``python -m fedvlp.flare.child``, started by flare/executor.py for every task.

It receives one task, answers it and ends. What a site remembers is on disk (federation/site.py), so nothing is lost
with it. Under torchrun it is several processes, one per GPU, that train together: rank 0 alone talks to FLARE.
"""

from __future__ import annotations

import os
import threading
import time

import nvflare.client as flare

from fedvlp.core.types import Update
from fedvlp.deploy.envelope import Behind
from fedvlp.flare import child_protocol, messages
from fedvlp.flare.task_handler import TaskHandler
from fedvlp.training import distributed

LAST_WORDS = 5.0
"""Seconds that rank 0 is given to tell the site of an error, before torchrun ends it because another rank did."""


def main() -> None:
    """Answers tasks until FLARE says that there are no more."""
    messages.register()
    distributed.join()
    if distributed.together():
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if distributed.rank() != 0:
        _follow()
        distributed.leave()
        return
    flare.init()
    failed = False
    while flare.is_running() and not failed:
        reply, behind = _reply()
        flare.send(child_protocol.answer(reply, behind))
        failed = isinstance(reply, Exception)
    if distributed.together() and not failed:
        child_protocol.to_ranks(None)
        distributed.leave()


def _reply() -> tuple[Update | Exception, Behind | None]:
    try:
        task = child_protocol.in_child(flare.receive())
        if distributed.together():
            child_protocol.to_ranks(task)
        return answer(task)
    except Exception as error:
        return error, None


def answer(task: child_protocol.Task) -> tuple[Update, Behind | None]:
    """The update, and the records that it rests on. An abort ends this process."""
    message, run, experiment, paths, most = task
    handler = TaskHandler(experiment, paths)
    return handler.answer(message, run, lambda: False, most), handler.behind


def _follow() -> None:
    """Run the same task on ranks above 0 and discard the result. An error here ends all ranks, which costs the task."""
    try:
        while task := child_protocol.to_ranks(None):
            answer(task)
    except Exception:
        time.sleep(LAST_WORDS)
        raise


def _end_with(torchrun: int) -> None:
    """A rank is in a session of its own: when torchrun is killed, nobody else would end it."""
    while os.getppid() == torchrun:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
