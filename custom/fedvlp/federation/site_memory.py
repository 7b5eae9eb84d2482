"""What a site remembers between tasks: named tensors on its disk, by task."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from fedvlp.core.checkpoint import load_tensors, save_tensors
from fedvlp.core.site_error import SiteError
from fedvlp.core.snapshots import LAST_ROUNDS
from fedvlp.core.types import Broadcast, State, Update

FORGOTTEN = "forgotten"
"""Name of the empty file that says that versions were removed for their age; its ending is the first one's task."""


def task_of(phases: Callable[[int], tuple[str, ...]], message: Broadcast | Update) -> tuple[int, int]:
    """(round, phase index) of a message; a phase that only measures comes last."""
    names = phases(message.round)
    return message.round, names.index(message.phase) if message.phase in names else len(names)


class MemoryGoneError(SiteError, RuntimeError):
    """The site no longer has what it remembered before a task."""


class SiteMemory:
    """A site's declared memory on disk, one version per task, so that a repeated task starts from the same memory.

    As the server can be put back to the beginning of its last ``LAST_ROUNDS`` rounds (core/snapshots.py), so can
    a memory that is on disk.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._unsaved: dict[tuple[int, int], State] = {}

    def before(self, task: tuple[int, int]) -> State:
        """The newest memory older than ``task`` = (round, phase index); empty before the first.

        Raises MemoryGoneError for a task from before all that is kept: to start from nothing would not be the same run.
        """
        if not self.reaches(task):
            raise MemoryGoneError(
                public=(
                    "this site no longer has its memory from before round {number}: put the run back by at most "
                    "{last_rounds} rounds, or to round 0"
                ),
                number=task[0],
                last_rounds=LAST_ROUNDS,
            )
        known = [key for key in self._versions() if key < task]
        if not known:
            return {}
        newest = max(known)
        return load_tensors(self._file(newest))[0] if self.folder else self._unsaved[newest]

    def newest(self) -> State:
        """The memory after the last task; empty before the first."""
        return self.before((sys.maxsize, 0))

    def after(self, task: tuple[int, int], memory: State) -> None:
        """Keeps ``memory`` as it is after ``task``; versions that can no longer be asked for are removed."""
        if self.folder:
            save_tensors(self._file(task), memory)
        else:
            self._unsaved[task] = {name: tensor.clone() for name, tensor in memory.items()}
        self.back_to((task[0], task[1] + 1))  # what is later is of a run that was begun again before it
        versions = sorted(self._versions())
        # The rounds that the server can be put back to: a process has no run folder to put back.
        horizon = task[0] + 1 - (LAST_ROUNDS if self.folder else 1)
        too_old = [version for version in versions if version[0] < horizon][:-1]
        if too_old and self.folder and not self._forgotten():
            (self.folder / f"{FORGOTTEN}.{too_old[0][0]:05d}-{too_old[0][1]}").touch()
        last_of_round = {round: (round, phase) for round, phase in versions}  # a run is put back to whole rounds
        between = [v for v in versions if horizon <= v[0] < task[0] and v != last_of_round[v[0]]]
        for old in too_old + between + [version for version in versions if version[0] == task[0]][:-2]:
            self._remove(old)

    def back_to(self, task: tuple[int, int]) -> None:
        """Forgets ``task`` and all that came after it."""
        for version in self._versions():
            if version >= task:
                self._remove(version)

    def reaches(self, task: tuple[int, int]) -> bool:
        """Whether what was remembered before ``task`` is still there."""
        forgotten = self._forgotten()
        return forgotten is None or forgotten >= task or any(version < task for version in self._versions())

    def _forgotten(self) -> tuple[int, int] | None:
        """The first task whose memory was removed for its age."""
        for file in self.folder.glob(f"{FORGOTTEN}.*") if self.folder else ():
            round, _, phase = file.suffix[1:].partition("-")
            return int(round), int(phase)
        return None

    def _remove(self, version: tuple[int, int]) -> None:
        if self.folder:
            self._file(version).unlink(missing_ok=True)
        else:
            del self._unsaved[version]

    def clear(self) -> None:
        """Forgets everything: a new run begins."""
        self._unsaved.clear()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _versions(self) -> list[tuple[int, int]]:
        if self.folder is None:
            return list(self._unsaved)
        stems = (file.stem.split("-") for file in self.folder.glob("[0-9]*-[0-9]*.safetensors"))
        return [(int(round), int(phase)) for round, phase in stems]

    def _file(self, task: tuple[int, int]) -> Path:
        assert self.folder is not None
        return self.folder / f"{task[0]:05d}-{task[1]}.safetensors"
