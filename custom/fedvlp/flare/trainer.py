"""The training child of a site: ``python -m fedvlp.flare.trainer``, started by flare/executor.py for every task.

It receives one task, answers it and ends. What a site remembers is on disk (core/site.py), so nothing is lost with it.
"""

from __future__ import annotations

import nvflare.client as flare

from fedvlp.core.types import Update
from fedvlp.flare import handover, wire
from fedvlp.flare.door import Door


def main() -> None:
    """Answers tasks until FLARE says that there are no more."""
    wire.register()
    flare.init()
    while flare.is_running():
        flare.send(handover.answer(_reply()))


def _reply() -> Update | Exception:
    try:
        message, run, experiment, place = handover.in_child(flare.receive())
        return Door(experiment, place).answer(message, run, should_stop=lambda: False)  # an abort ends this process
    except Exception as error:
        return error


if __name__ == "__main__":
    main()
