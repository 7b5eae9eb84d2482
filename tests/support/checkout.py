"""A copy of the project in which `make` does not install, as every command there has this environment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copied(folder: Path) -> Path:
    """The project in ``folder``; `make VENV=environment` runs there with what is installed here."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "build", ".*_cache"))
    (folder / "environment").symlink_to(sys.prefix)
    # older than the environment: make must not reinstall
    for name in ("pyproject.toml", "studies/pyproject.toml", "constraints.txt", "provisioning/requirements.txt"):
        os.utime(folder / name, (0, 0))
    return folder
