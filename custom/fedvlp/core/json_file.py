"""Reads JSON files that come from elsewhere, within bounds: a run, a job or a model from another machine.

Without torch, since FLARE's parent process reads jobs with it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG
from typing import Any

LARGEST_JSON = 64 << 20
"""Bytes of the largest JSON file of a run, the assignment of a million records to sites."""

DEEPEST = 64
"""Levels of lists and objects; a configuration of fedvlp has about 10."""

LARGEST_JOB = 4 << 20
"""Bytes of the largest file of a job; those of the presets have at most 20,000."""

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OSError)
"""What reading a run's files may raise, whatever somebody put there; a damaged checkpoint raises CheckpointError."""


def read_json(path: Path, most: int = LARGEST_JSON, follow: bool = False) -> Any:
    """The content of an untrusted JSON file, as ``read_bounded`` reads it.

    Raises ValueError too where its values are more than ``DEEPEST`` levels deep.
    """
    try:
        value = json.loads(read_bounded(path, most, follow))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise ValueError(f"{path.name} is nested too deeply")
    return value


def read_bounded(path: Path, most: int, follow: bool = False) -> bytes:
    """The content of an untrusted file.

    Raises FileNotFoundError where there is none, ValueError for anything but a regular file of at most ``most`` bytes.
    A link is followed where the caller says so alone: towers in a cache of Hugging Face are links.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)  # to open a pipe must not wait for a writer
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            status = os.fstat(file.fileno())
            content = file.read(most + 1) if S_ISREG(status.st_mode) and status.st_size <= most else None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}; links and folders are not read") from None
    if content is None or len(content) > most:
        raise ValueError(f"{path.name} is no regular file of at most {most:,} bytes")
    return content


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def refuse_special(path: Path) -> None:
    """Raises OSError for a pipe, a device or a folder: to open it could wait, or read, for ever."""
    if not S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
