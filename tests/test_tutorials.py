"""The tutorials run, cell by cell, in an empty folder: lines with "!" as a shell, all else as Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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


def program(path: Path) -> str:
    """The cells of a notebook as one program. In a shell's line {name} is a variable, as in Jupyter."""
    lines = ["import subprocess"]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            for line in "".join(cell["source"]).splitlines():
                shell = re.match(r"!(.*)", line)
                lines.append(f"subprocess.run(f{shell[1]!r}, shell=True, check=True)" if shell else line)
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path) -> None:
    search = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": search, "FEDVLP_HOME": str(tmp_path / "runs")}
    command = [sys.executable, "-c", program(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
