"""Per-round checkpoints for rollback."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from fedvlp.core.checkpoint import CheckpointError, load_header, replace_durably

logger = logging.getLogger(__name__)

APART = "apart"
"""Folder beside the checkpoint, and entry of its header, of what has files of its own (Server.remember)."""

LAST_ROUNDS = 5
"""Rounds before whose start a run can be put back: the server and the sites keep what that needs, and no more."""


class Snapshots:
    """The server at the beginning of its last ``LAST_ROUNDS`` rounds: ``rounds/round-<round>.safetensors``.

    They are hard links to what was the checkpoint, so that keeping one writes nothing; where the file system has no
    links, copies. None of them is worth the run: one that cannot be kept is a warning, and on a full disk they make way
    for the next checkpoint. The records of the run are in one file for all of them (core/history.py), and large parts
    of the memory in the folder ``APART``, whose files go with the last checkpoint that names them.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.folder = checkpoint.parent / "rounds"

    def rounds(self) -> list[int]:
        """The rounds at whose beginning the server is kept, in order."""
        return sorted(int(file.stem.partition("-")[2]) for file in self.folder.glob("round-*.safetensors"))

    def file(self, round: int) -> Path:
        """The server at the beginning of ``round``, if it is among ``rounds``."""
        return self.folder / f"round-{round:05d}.safetensors"

    def store(self, round: int) -> None:
        """Keeps the checkpoint as it is now, at the beginning of ``round``; those that are too old are removed.

        So are later ones, which are of rounds that were undone.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file(round).unlink(missing_ok=True)
            _link(self.checkpoint, self.file(round))
        except OSError as error:
            logger.warning(
                "round %d: the checkpoint is not kept beside the newest one: %s; the run cannot be put back to here",
                round,
                error.strerror,
            )
        self.forget_after(round)
        for old in self.rounds()[:-LAST_ROUNDS]:
            self._remove(old)

    def save(self, write: Callable[[], None]) -> None:
        """Calls ``write``, which replaces the checkpoint; on a full disk the oldest kept ones are removed for it.

        Raises CheckpointError when there is no room even so.
        """
        others = [round for round in self.rounds() if not self._is_current(round)]
        while True:
            try:
                write()
                return
            except CheckpointError as error:
                if not error.full or not others:
                    raise
            oldest = others.pop(0)
            logger.warning("the disk is full: the kept checkpoint of round %d makes room", oldest)
            self._remove(oldest)

    def restore(self, round: int) -> None:
        """Makes the kept checkpoint of ``round`` the newest one. Raises CheckpointError, nothing being changed."""
        if not self._is_current(round):
            temporary = self.checkpoint.with_name(f".{self.checkpoint.name}.{os.getpid()}.tmp")
            try:
                _link(self.file(round), temporary)
                replace_durably(temporary, self.checkpoint)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise CheckpointError(f"cannot put back the checkpoint of round {round}: {error.strerror}") from error
        self.forget_after(round)

    def forget_after(self, round: int) -> None:
        """Removes the kept checkpoints of later rounds."""
        for later in self.rounds():
            if later > round:
                self._remove(later)

    def _is_current(self, round: int) -> bool:
        """Whether the file is the checkpoint itself: removing it frees nothing."""
        file = self.file(round)
        return file.exists() and self.checkpoint.exists() and file.samefile(self.checkpoint)

    def _remove(self, round: int) -> None:
        file, apart = self.file(round), self.checkpoint.parent / APART
        with contextlib.suppress(OSError, CheckpointError):
            named = _apart(file) if apart.exists() else set()
            file.unlink()
            for name in named - (self._named() if named else set()):
                (apart / name).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Removes the files that no checkpoint names: of a phase that was undone, or before the last rounds.

        Not to be called during a phase, whose files the checkpoint that follows will name.
        """
        folder = self.checkpoint.parent / APART
        if not folder.exists():
            return
        with contextlib.suppress(OSError, CheckpointError):  # a damaged checkpoint may name any
            named = self._named()
            for file in folder.iterdir():
                if file.name not in named:
                    file.unlink()

    def _named(self) -> set[str]:
        """The files that the checkpoint and those of the last rounds name."""
        files = [self.checkpoint, *map(self.file, self.rounds())]
        return {name for file in files if file.exists() for name in _apart(file)}


def _apart(checkpoint: Path) -> set[str]:
    """The files that a checkpoint names."""
    return set(load_header(checkpoint).get(APART, {}).values())


def _link(source: Path, target: Path) -> None:
    """Another name for the file; a copy where the file system has none, complete or not there at all."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        try:
            shutil.copyfile(source, target)
        except OSError:
            target.unlink(missing_ok=True)
            raise
