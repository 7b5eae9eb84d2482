"""FLARE's ``audit.log``: each event one line that can be read, no file larger than a disk has place for.

FLARE writes what it is told: a command with a line break is a second line, in whosever name it likes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from logging.handlers import RotatingFileHandler
from threading import Lock
from typing import Any

from nvflare.fuel.sec.audit import Auditor, AuditService

from fedvlp.core.validate import printable

REFUSED = "message_refused"
"""The action of the line of what was refused."""

LARGEST, KEPT = 64 << 20, 9
"""Bytes of a file, and how many older ones stay beside it: audit.log.1 to audit.log.9."""

LONGEST = 1000  # characters of what one event says of a thing


def write_single_lines() -> None:
    """Has FLARE's auditor, in this process, write one printable line for an event, and begin a new file in time."""
    for name in ("add_event", "add_job_event"):
        if not hasattr(getattr(Auditor, name), "__wrapped__"):
            setattr(Auditor, name, _single(getattr(Auditor, name)))


def _single(add: Callable[..., str]) -> Callable[..., str]:
    @wraps(add)
    def added(auditor: Auditor, *said: Any, **named: Any) -> str:
        _begin_new_file(auditor)
        return add(auditor, *map(_shown, said), **{key: _shown(value) for key, value in named.items()})

    return added


def _shown(said: Any) -> str:
    return printable(str(said))[:LONGEST]


def _begin_new_file(auditor: Auditor) -> None:
    """Keep a full file under another name. Each process of FLARE has a file of its own."""
    with auditor._lock:
        file = auditor.audit_file
        if file is not None and file.tell() > LARGEST:
            file.close()
            RotatingFileHandler(file.name, backupCount=KEPT, delay=True).doRollover()
            auditor.audit_file = open(file.name, "a", encoding="utf-8")  # noqa: SIM115  # the auditor closes it


class Allowance:
    """How often each sender may do something: ``most`` times at once, and ``a_second`` again."""

    def __init__(self, most: int, a_second: float) -> None:
        self.most, self.a_second = most, a_second
        self._lock = Lock()
        self._senders: dict[str, tuple[float, float, int]] = {}  # what it has left, since when, how often it had none

    def take(self, sender: str) -> int | None:
        """None where the sender has nothing left; else how often that was so since it last had."""
        with self._lock:
            now = time.monotonic()
            left, since, missed = self._senders.get(sender, (float(self.most), now, 0))
            left = min(self.most, left + (now - since) * self.a_second)
            has = left >= 1
            self._senders[sender] = (left - 1, now, 0) if has else (left, now, missed + 1)
        return missed if has else None


class RefusedLines:
    """The lines of what was refused, so few that no sender fills the disk: its first thousand, then one a second."""

    def __init__(self) -> None:
        self.allowance = Allowance(1000, 1.0)  # 0.4 MB at once

    def write(self, sender: str, user: str, msg: str) -> None:
        """One line, unless the sender has had too many. The next one says how many were left out."""
        left_out = self.allowance.take(sender)
        if left_out is not None:
            more = f"; before it {left_out} more of this sender were refused without a line" if left_out else ""
            AuditService.add_event(user=user, action=REFUSED, msg=msg + more)
