"""What was measured of a run beside its own records: files in its folder ``evaluation``, and of which model they are.

A run that is put back (run/rollback.py) and resumed ends with another model, of which the files of the first say
nothing. Each file that a report reads is noted with the digest of the records of the phases behind its model.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fedvlp.core.checkpoint import CheckpointError, load_header, save_json
from fedvlp.core.json_file import read_json
from fedvlp.run.folder import RunFolder

Line = TypeVar("Line")

NOTE = "measured.json"
"""In the folder of the files: name of a file -> digest."""

RECALLS, AREAS, TOWER, AUDIT = "recall.csv", "zero-shot-findings.csv", "tower.csv", "audit.json"
PROBE, ZERO_SHOT = "linear-probe", "zero-shot"  # their tables, with more behind a hyphen
"""What a report reads."""


def folder_of(folder: RunFolder) -> Path:
    """Where the files of a run are."""
    return folder.path / "evaluation"


def note(folder: RunFolder, file: Path) -> None:
    """Notes that a file is of the run's model as it is."""
    save_json(folder_of(folder) / NOTE, {**_noted(folder), file.name: _model(folder)})


def is_of_another_model(folder: RunFolder, file: Path) -> bool:
    """Whether the file is noted for another model than the run's; one that was written before there were notes is not.

    So nothing is shown of a model that is gone, and what an older fedvlp measured is not lost.
    """
    noted, model = _noted(folder).get(file.name, ""), _model(folder)
    return bool(noted and model) and noted != model


def lines_of(folder: RunFolder, file: Path, read: Callable[[Mapping[str, str]], Line]) -> list[Line]:
    """The lines of a table as ``read`` takes them; none where it is missing or of another model.

    Raises ValueError for damage.
    """
    if not file.exists() or is_of_another_model(folder, file):
        return []
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            return [read(line) for line in csv.DictReader(lines)]
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{folder.path}: evaluation/{file.name} is not what fedvlp wrote there; remove it and measure again with "
            "`fedvlp report RUN --intervals` or `fedvlp evaluate`"
        ) from None


def table_of(folder: RunFolder, name: str) -> list[dict[str, str]]:
    """The lines of an evaluation's table of the run's own records; none where nobody measured it."""
    return lines_of(folder, folder_of(folder) / f"{name}.csv", dict)


def subgroups(folder: RunFolder) -> list[tuple[str, ...]]:
    """What was measured by subgroup of patients: subgroup, evaluation, test records, macro AUC, accuracy in percent."""
    probed = table_of(folder, f"{PROBE}-subgroups")
    rows = [
        (f"{line['by']}: {line['subgroup']}", f"linear probe, {line['train_on']}", line["test_records"],
         interval(line, "macro_auc", 3), interval(line, "accuracy", 1))
        for line in probed if line["train_on"] == probed[-1]["train_on"]
    ]  # fmt: skip
    rows += [
        (line["subgroup"], f"zero-shot, {line['model']} model", line["records"], _rounded(line["macro_auc"], 3),
         _rounded(line["accuracy"], 1))
        for line in table_of(folder, f"{ZERO_SHOT}-subgroups")
    ]  # fmt: skip
    return sorted(rows)


def interval(line: Mapping[str, str], name: str, digits: int) -> str:
    """A figure of a table's line with its interval; a dash for none."""
    value, low, high = (_rounded(line[f"{name}{end}"], digits) for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]" if line[name] else value


def _rounded(value: str, digits: int) -> str:
    return f"{float(value):.{digits}f}" if value else "\N{EN DASH}"


def is_current(folder: RunFolder, file: Path) -> bool:
    """Whether the file need not be measured again: it is of the run's model, or without a note and no older than it."""
    if not file.exists() or is_of_another_model(folder, file):
        return False
    return file.name in _noted(folder) or file.stat().st_mtime >= folder.model.stat().st_mtime


def forget(folder: RunFolder, evaluations: Iterable[str]) -> None:
    """Removes what fedvlp measured of the run's model: what is noted, and the files of ``evaluations``.

    Their tables and figures are called by their names, and by more behind a hyphen. Other files stay.
    """
    names, known = tuple(evaluations), (RECALLS, AREAS, TOWER, AUDIT, NOTE, *_noted(folder))
    for file in folder_of(folder).glob("*"):
        of_evaluation = file.suffix in (".csv", ".png") and any(f"{file.stem}-".startswith(f"{n}-") for n in names)
        if file.is_file() and (file.name in known or of_evaluation):
            file.unlink()
    with suppress(OSError):  # it holds other files, or there is none
        folder_of(folder).rmdir()


def _noted(folder: RunFolder) -> dict[str, str]:
    try:
        noted: dict[str, str] = read_json(folder_of(folder) / NOTE)
        return noted if isinstance(noted, dict) else {}
    except (OSError, ValueError):
        return {}


def _model(folder: RunFolder) -> str:
    """The digest of all records of the run's phases, their seconds among them; "" where the checkpoint has none."""
    with suppress(CheckpointError):
        written = load_header(folder.checkpoint).get("history")
        return str(written["digest"]) if isinstance(written, dict) else ""
    return ""
