"""What a site remembers between tasks: named tensors on its disk, by task."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from fedvlp.core.checkpoint import load_tensors, save_tensors
from fedvlp.core.types import State


class SiteMemory:
    """A site's declared memory on disk, one version per task, so that a repeated task starts from the same memory."""

    def __init__(self, folder: Path | None, versions: int = 2) -> None:
        self.folder = folder
        self.versions = versions
        self._unsaved: dict[tuple[int, int], State] = {}

    def before(self, task: tuple[int, int]) -> State:
        """The newest memory older than ``task`` = (round, phase index); empty before the first."""
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
        versions = sorted(self._versions())
        later = [version for version in versions if version > task]  # of a run that was begun again before them
        for old in later + [version for version in versions if version <= task][: -self.versions]:
            if self.folder:
                self._file(old).unlink(missing_ok=True)
            else:
                del self._unsaved[old]

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
