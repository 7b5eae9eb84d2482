"""The training child of a site: ``python -m fedvlp.flare.trainer``, started by flare/executor.py for every task.

It receives one task, answers it and ends. What a site remembers is on disk (core/site.py), so nothing is lost with it.
Under torchrun it is several processes, one per GPU, that train together: rank 0 alone talks to FLARE.
"""

from __future__ import annotations

import os
import threading
import time

import nvflare.client as flare

from fedvlp.core import ranks
from fedvlp.core.types import Update
from fedvlp.flare import handover, wire
from fedvlp.flare.door import Door

LAST_WORDS = 5.0
"""Seconds that rank 0 is given to tell the site of an error, before torchrun ends it because another rank did."""


def main() -> None:
    """Answers tasks until FLARE says that there are no more."""
    wire.register()
    ranks.join()
    if ranks.together():
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if ranks.rank() != 0:
        _follow()
        return
    flare.init()
    failed = False
    while flare.is_running() and not failed:
        reply = _reply()
        flare.send(handover.answer(reply))
        failed = isinstance(reply, Exception)
    if ranks.together() and not failed:
        handover.to_ranks(None)


def _reply() -> Update | Exception:
    try:
        task = handover.in_child(flare.receive())
        if ranks.together():
            handover.to_ranks(task)
        return _answer(task)
    except Exception as error:
        return error


def _answer(task: handover.Task) -> Update:
    message, run, experiment, place = task
    return Door(experiment, place).answer(message, run, should_stop=lambda: False)  # an abort ends this process


def _follow() -> None:
    """The same work as rank 0's, unsaid. An error here ends all ranks, which costs the task."""
    try:
        while task := handover.to_ranks(None):
            _answer(task)
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
