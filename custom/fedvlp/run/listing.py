"""The runs below a folder: what each is, how far it came, what it reached, and what it takes on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from fedvlp.core.checkpoint import CheckpointError
from fedvlp.core.json_file import UNREADABLE, read_json
from fedvlp.core.validate import counted
from fedvlp.evaluation import metric_names as names
from fedvlp.run.folder import RunFolder
from fedvlp.run.lock import in_use
from fedvlp.run.metrics import Record, summary


@dataclass(frozen=True)
class Listed:
    """One run. Recall is nan where the test split was not measured."""

    name: str  # "feddra/001", below the folder
    state: str  # finished | running | stopped | not begun | unreadable
    phases: str  # "round 3 of 6, joint": the last complete one; "" before the first
    average: (
        float  # test R@1 of the last measured model, mean over sites, %; of the whole set where no site has a batch
    )
    worst: float  # the same at the worst site
    bytes: int  # of all its files


def listed(root: Path) -> list[Listed]:
    """Every run in ``root``/<experiment>/<number>, by name. A folder that cannot be read is listed as that."""
    return [_of(path.parent, root) for path in sorted(root.glob("*/*/config.json"))]


def _of(path: Path, root: Path) -> Listed:
    folder, name = RunFolder(path), path.relative_to(root).as_posix()
    size = sum(_bytes(file) for file in path.rglob("*"))
    try:
        history, rounds = folder.history(), _rounds(folder)
        figures = summary(history).get("trained", {})
        average, worst = (_recall(figures, kind) for kind in (names.AVERAGE, names.WORST))
        return Listed(name, _state(folder, history), _last(history, rounds), average, worst, size)
    except (*UNREADABLE, CheckpointError):
        return Listed(name, "unreadable", "", math.nan, math.nan, size)


def _bytes(file: Path) -> int:
    """Of a file; 0 of a folder, and of a file that a run has renamed since it was found."""
    try:
        status = file.stat()
    except OSError:
        return 0
    return status.st_size if S_ISREG(status.st_mode) else 0


def _rounds(folder: RunFolder) -> int:
    """The rounds of a run, as its configuration says them; a plugin that it needs may not be here."""
    config = read_json(folder.config)
    return int(config["args"]["rounds"]["args"]["rounds"])


def _recall(figures: dict[str, float], kind: str) -> float:
    """Test R@1 in batches, or among the whole set where a site has no batch."""
    scopes = (names.over_sites(names.recall("test", 1, scope), kind) for scope in (names.IN_BATCH, names.WHOLE_SET))
    return next((figures[name] for name in scopes if name in figures), math.nan)


def _state(folder: RunFolder, history: list[Record]) -> str:
    if in_use(folder.path):
        return "running"
    if folder.finished:
        return "finished"
    return "stopped" if history else "not begun"


def _last(history: list[Record], rounds: int) -> str:
    """The last complete phase; the last evaluation comes after the last round."""
    if not history:
        return ""
    last = history[-1]
    if last["round"] < rounds:
        return f"round {last['round'] + 1} of {rounds}, {last['phase']}"
    return f"all {counted(rounds, 'round')}"
