"""What may leave a site of an error: a sentence that was written for the server, with numbers and hashes in it.

Nobody looks for a path or a patient's words in a text. A text leaves only where the code that raised the error wrote
it as a literal for others (``public``); of every other error the server learns that there was one.
"""

from __future__ import annotations

import errno
import re
from enum import Enum
from numbers import Real
from typing import ClassVar

IN_THE_LOG = "the log of the site says why"
UNTOLD = f"an error: {IN_THE_LOG}"
"""All that leaves of an error that is no SiteError."""

UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})
"""Numbers of the system's errors where it takes no file: a disk that is read-only or full, another account's folder."""

_HASH_OR_VERSION = re.compile(r"[0-9a-f]{1,16}|[0-9]{1,4}(\.[0-9]{1,4}){0,3}")
_ONE_LINE = re.compile(r"""[][\w .,:;()'"`/+=@%?*-]{1,600}""", re.ASCII)


class FailureKind(str, Enum):
    """Why there is no update. What the server does next depends on this, never on a text."""

    FAILED = "failed"  # the site could not do the task
    LOST = "lost"  # no reply: silence, or a process that died
    UNREADABLE = "unreadable"  # what came is no update


class SiteError(Exception):
    """An error with two texts: ``str(error)`` for this machine's log, and ``public``, which may leave the site.

    Args:
        local: may name files, data sets, columns and findings; "" = as ``public``.
        public: a literal, with a field for each of ``numbers``; "" = ``told``, or the kind of the error alone.
            It is never an f-string (tests/core/test_site_error.py), so that no text can get into it.
        numbers: of the fields: numbers, short hashes and versions. Any other value keeps the whole sentence here.
    """

    told: ClassVar[str] = ""  # the public sentence of every error of a class
    kind: ClassVar[FailureKind] = FailureKind.FAILED  # decides what the server does next

    def __init__(self, local: str = "", *, public: str = "", **numbers: object) -> None:
        said = (public or self.told).format(**numbers)
        super().__init__(local or said)
        leaves = said and all(map(may_leave, numbers.values()))
        self.public = f"{type(self).__name__}: {said if leaves else IN_THE_LOG}"


class NotFiniteError(SiteError, FloatingPointError):
    """A loss or a tensor is NaN or infinite."""


def may_leave(value: object) -> bool:
    """Whether a value is a number, a short hash or a version."""
    return isinstance(value, Real) or (isinstance(value, str) and _HASH_OR_VERSION.fullmatch(value) is not None)


def one_line(text: object) -> str:
    """``text`` where it is one short line of plain characters; else that there was an error.

    For what comes out of another process, which may have any text and forge a line of a log.
    """
    return text if isinstance(text, str) and _ONE_LINE.fullmatch(text) else UNTOLD
