"""One FLARE process a kit: a second one, on this machine or on another that shares the folder, ends at once.

Two servers on one kit would share a job store, and the second would try to open the port for ever; the second process
of a site would put the first one out.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from fedvlp.run.lock import FolderInUseError, only_writer

PARENTS = ("nvflare.private.fed.app.server.server_train", "nvflare.private.fed.app.client.client_train")
"""The programs of FLARE that begin in the folder of the kit. Those of jobs build the same components later."""

_until_the_end = ExitStack()


def hold_kit() -> bool:
    """Holds the kit until this process ends, if it is one of ``PARENTS``, and says so. Exits where another holds it."""
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is None or program.name not in PARENTS:
        return False
    try:
        _until_the_end.enter_context(only_writer(Path.cwd(), what=f"the kit of {Path.cwd().name}"))
    except FolderInUseError as error:
        sys.exit(f"not started: {error}")
    except OSError as error:
        sys.exit(
            f"not started: the kit cannot be written ({error.strerror}); make it this account's, on a disk with room"
        )
    return True
