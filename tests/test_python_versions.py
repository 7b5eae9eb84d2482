"""The versions of Python that fedvlp says it runs on: pages agree, and those on this machine can import all of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import other_python

ROOT = Path(__file__).parents[1]
SAID = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def python(version: str) -> str | None:
    """An interpreter of this version that starts: on the path, or of pyenv or uv."""
    homes = [Path.home() / ".pyenv" / "versions", Path.home() / ".local" / "share" / "uv" / "python"]
    there = [str(path) for home in homes for path in sorted(home.glob(f"*{version}.*/bin/python3"))]
    for name in [*there, shutil.which(f"python{version}")]:
        if name and subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode == 0:
            return name
    return None


@pytest.mark.parametrize("version", SAID)
def test_every_module_and_setting_is_known_to_it(version: str) -> None:
    """With stand-ins for packages that it lacks, as torch: what is tested is what the version makes wrong."""
    found = python(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [found, other_python.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    said, modules, settings, sources, table = done.stdout.split(" ", 4)
    assert said == version
    assert int(modules) == len(list((ROOT / "custom/fedvlp").rglob("*.py"))) - 1, "all but the one that finds them"
    assert int(settings) > 50
    assert int(sources) > 5
    assert table.strip() == "[['a.png', 'no effusion']]", "a NUL in a cell is no error of any version"


def test_pages_say_the_same_versions() -> None:
    span = f"Python {SAID[0]} to {SAID[-1]}"
    assert [int(version.partition(".")[2]) for version in SAID] == list(range(10, 10 + len(SAID)))
    assert f'requires-python = ">={SAID[0]}"' in (ROOT / "pyproject.toml").read_text()
    for page in ("README.md", "provisioning/README.md"):
        assert re.findall(r"Python 3\.\d+ to 3\.\d+", (ROOT / page).read_text()) == [span]
    assert "tests/test_python_versions.py" in (ROOT / "Makefile").read_text()
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in SAID
