"""The tutorials run, cell by cell, in an empty folder: lines with "!" as a shell's, all else as Python."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support import notebooks, programs
from support.provisioned import BIN

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))
NAMES = {"first-run", "own-table", "new-method", "three-hospitals", "reading-a-report", "exporting"}


def test_they_are_all_there_and_without_outputs() -> None:
    """What a cell printed on somebody's machine is not what it prints today."""
    assert {path.stem for path in TUTORIALS} == NAMES
    for path in TUTORIALS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert cell["cell_type"] in ("markdown", "code")
            assert not cell.get("outputs"), path.stem


def smaller(command: str) -> str:
    """The same line with fewer records, rounds and steps where it says how many."""
    for key, value in {"data.size": "300", "rounds.rounds": "1", "method.local_steps": "2"}.items():
        command = re.sub(rf"{re.escape(key)}=\d+", f"{key}={value}", command)
    return command


def shell(command: str) -> None:
    """Runs a line of a notebook where a notebook would; what it prints goes to a file where the line says so."""
    folder, environment = Path.cwd(), dict(os.environ)
    plain, _, file = smaller(command).partition(" > ")
    output = programs.run(plain, folder, environment)
    (folder / file).write_text(output) if file else print(output)


@pytest.mark.slow(seconds=40)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FEDVLP_HOME", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    names = {"shell": shell}
    for cell in notebooks.code(path):
        exec(compile(cell, path.stem, "exec"), names)


def test_a_page_of_the_site_has_what_the_cells_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "KEPT", tmp_path / "kept")
    written = [("markdown", "# Two"), ("code", "n = 1 + 1\nprint(n)"), ("code", "!echo {n} files")]
    file = tmp_path / "two.ipynb"
    file.write_text(json.dumps({"cells": [{"cell_type": kind, "source": [text]} for kind, text in written]}))
    shown = notebooks.page(file, run=True)
    assert shown == (
        "# Two\n\n```python\nn = 1 + 1\nprint(n)\n```\n\n```text\n2\n```\n\n"
        "```python\n!echo {n} files\n```\n\n```text\n2 files\n```\n"
    )
    assert "```text" not in notebooks.page(file, run=False)
