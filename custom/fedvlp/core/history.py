"""The records of a run's phases: a file of JSON lines beside the checkpoint that only grows.

In the checkpoint itself they would be written again after every phase, which costs the square of the rounds. The
checkpoint says with :class:`Written` which of the lines belong to it. They are written first: what a kill leaves
beyond them is cut when the run resumes, and missing lines are an error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvlp.core.checkpoint import CheckpointError, unwritten
from fedvlp.core.json_file import refuse_special

FILE = "history.jsonl"
"""Name of the file, in the folder of the checkpoint."""


@dataclass(frozen=True)
class Written:
    """The lines that belong to a checkpoint: the first ``records`` of the file, ``size`` bytes.

    ``digest`` is chained, so that extending it costs one line and it reveals any earlier change: that of line n is
    SHA-256 of the digest of line n - 1, in hexadecimal digits, and the line.
    """

    records: int = 0
    size: int = 0
    digest: str = ""

    def with_line(self, line: bytes) -> Written:
        """A copy with one more line."""
        digest = hashlib.sha256(self.digest.encode() + line).hexdigest()
        return Written(self.records + 1, self.size + len(line), digest)


def append(file: Path, before: Written, records: Sequence[dict[str, Any]]) -> Written:
    """Writes ``records`` after the lines of ``before``, cutting what else is there, and syncs; returns what is there.

    Raises CheckpointError where the disk takes no more, or where lines of ``before`` are missing.
    """
    now, lines = before, []
    for record in records:
        lines.append(json.dumps(record).encode() + b"\n")
        now = now.with_line(lines[-1])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "r+b" if before.size else "wb") as handle:
            if handle.seek(0, os.SEEK_END) < before.size:
                raise _missing(file, before)
            handle.truncate(before.size)
            handle.seek(before.size)
            handle.writelines(lines)
            handle.flush()
            os.fsync(handle.fileno())
    except FileNotFoundError:
        raise _missing(file, before) from None
    except OSError as error:
        raise unwritten(file, error, now.size - before.size, "The checkpoint") from error
    return now


def read(file: Path, written: Written) -> list[dict[str, Any]]:
    """The records of a checkpoint. Raises CheckpointError unless all of them are there as they were written."""
    try:
        refuse_special(file)
        with open(file, "rb") as handle:
            content = handle.read(written.size)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file.name} in {file.parent}: {error.strerror}",
            public="a file of the run is damaged, or gone",
        ) from error
    if len(content) < written.size:
        raise _missing(file, written)
    seen = Written()
    lines = content.splitlines(keepends=True)
    for line in lines:
        seen = seen.with_line(line)
    if seen != written:
        raise CheckpointError(
            f"{file.name} in {file.parent} does not hold the {written.records} records that the checkpoint beside it "
            "belongs to: it was changed, or is another run's; restore both from one copy"
        )
    try:
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file.name} in {file.parent} has a line that is not a record") from None


def _missing(file: Path, written: Written) -> CheckpointError:
    size = file.stat().st_size if file.exists() else 0
    return CheckpointError(
        f"{file.name} in {file.parent} has {size:,} bytes; the checkpoint beside it belongs to {written.records} "
        f"records of {written.size:,} bytes. Restore both from one copy"
    )
