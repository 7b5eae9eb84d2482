"""Puts a run back to the beginning of a round: what a poisoned update did since then is undone."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedvlp.core.server_state import Server
from fedvlp.core.snapshots import LAST_ROUNDS, Snapshots
from fedvlp.federation.site import MOMENTS
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.run import measurements, plugins
from fedvlp.run.evaluate import EVALUATIONS
from fedvlp.run.folder import RunFolder
from fedvlp.run.lock import only_writer
from fedvlp.run.status import STOPPED
from fedvlp.run.status_writer import write_end


class RollbackError(ValueError):
    """The run cannot be put back to that round; nothing was changed."""


def rollback(folder: RunFolder, round: int) -> int:
    """Puts the run back to before ``round``; returns the round that it was in. Resumed, it does ``round`` anew.

    Round 0 is the beginning: the run starts again with untrained weights. What a finished run brought (model, summary,
    report, and what was measured of the model) is removed, as it is of the undone rounds; metrics.csv says what is
    left, TensorBoard's files keep what they have.
    Sites of a simulation forget what they learnt since; sites of FLARE do when they take part again. Raises
    RollbackError, and FolderInUseError while a process writes the run.
    """
    folder.experiment()  # a folder without a run, or of another plugin, is refused by name
    with only_writer(folder.path):
        saved = folder.server()
        if saved is None:
            raise RollbackError(f"{folder.path} has no complete phase yet; there is nothing to undo")
        now = saved[0].round
        snapshots = Snapshots(folder.checkpoint)
        possible = [0, *(known for known in snapshots.rounds() if known)]
        if round not in possible:
            raise RollbackError(
                f"{folder.path} is in round {now} and cannot be put back to before round {round}; the last "
                f"{LAST_ROUNDS} rounds are kept: choose one of {', '.join(map(str, possible))} (0 is the beginning)"
            )
        before = []
        if round:  # a damaged one is refused here
            before = Server.load(snapshots.file(round), snapshots.checkpoint)[0].history
        memories = [SiteMemory(path) for path in _memories(folder)]
        for memory in memories:
            if not memory.reaches((round, 0)):
                raise RollbackError(
                    f"{memory.folder} no longer holds what its site remembered before round {round}; put the run back "
                    "to a later round, or to round 0"
                )
        if folder.status_file.exists():
            said = f"put back to before round {round}; submit the same job"
            write_end(folder.status_file, STOPPED, said)
        _forget_results(folder)  # first: until the checkpoint is replaced, resuming makes them again
        if round:
            snapshots.restore(round)
        else:
            folder.checkpoint.unlink()
            snapshots.forget_after(0)
        snapshots.tidy()
        for memory in memories:
            memory.back_to((round, 0))
        folder.note_all(before)
    return now


def _memories(folder: RunFolder) -> list[Path]:
    """The folders with one file a task: of the sites of a simulation, their optimisers, their ends of the wire."""
    sites = [path for path in sorted((folder.path / "sites").glob("*")) if path.is_dir()]
    beside = [path / name for path in sites for name in (MOMENTS, "wire")]
    return [*sites, *beside]


def _forget_results(folder: RunFolder) -> None:
    """Removes all that is of the model which the run ended with."""
    folder.model.unlink(missing_ok=True)
    shutil.rmtree(folder.model.parent, ignore_errors=True)
    for file in (folder.path / "summary.json", folder.page(), folder.page(films=True)):
        file.unlink(missing_ok=True)
    measurements.forget(folder, plugins.table("EVALUATIONS", EVALUATIONS, wanted=""))
