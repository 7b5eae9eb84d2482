"""The notebooks of docs/tutorials: their code as Python, and as pages of the site with what each cell prints.

python -m support.notebooks NOTEBOOK    runs one in the current folder, and prints its outputs as a JSON list
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "notebooks"
"""Outputs by the digest of notebook and package, so that they are made again only where either has changed."""
LONGEST = 3000  # characters of an output on the page


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook, each with its kind and its text."""
    written = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{"kind": cell["cell_type"], "text": "".join(cell["source"])} for cell in written]


def code(path: Path) -> list[str]:
    """The code cells as Python. In a shell's line {name} is a variable, as in Jupyter."""
    shown = (cell["text"] for cell in cells(path) if cell["kind"] == "code")
    return [re.sub(r"^!(.*)", lambda line: f"shell(f{line[1]!r})", text, flags=re.MULTILINE) for text in shown]


def shell(command: str) -> None:
    """Runs a line of a notebook and prints what it prints. Raises CalledProcessError where it fails."""
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    print(done.stdout, end="")


def outputs(path: Path) -> list[str]:
    """What each code cell prints in the current folder."""
    names, printed = {"shell": shell}, []
    for text in code(path):
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            exec(compile(text, path.stem, "exec"), names)
        printed.append(stream.getvalue())
    return printed


def page(path: Path, run: bool) -> str:
    """The notebook as Markdown; with ``run`` what its cells print stands below them. Raises CalledProcessError."""
    printed = iter(_kept_outputs(path) if run else [])
    parts = []
    for cell in cells(path):
        if cell["kind"] == "markdown":
            parts.append(cell["text"])
            continue
        parts.append(f"```python\n{cell['text']}\n```")
        if said := next(printed, "").strip("\n"):
            more = "\n..." if len(said) > LONGEST else ""
            parts.append(f"```text\n{said[:LONGEST]}{more}\n```")
    return "\n\n".join(parts) + "\n"


def _kept_outputs(path: Path) -> list[str]:
    sources = [path, *sorted((ROOT / "custom").rglob("*.py"))]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    file = KEPT / f"{path.stem}-{digest}.json"
    if not file.exists():
        command = [sys.executable, "-m", "support.notebooks", str(path)]
        paths = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))))
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PYTHONPATH": paths, "PATH": programs, "COLUMNS": "110", "NO_COLOR": "1"}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
        KEPT.mkdir(parents=True, exist_ok=True)
        file.write_bytes(done.stdout)
    listed: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return listed


if __name__ == "__main__":
    print(json.dumps(outputs(Path(sys.argv[1]))))
