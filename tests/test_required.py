"""A skip is no proof: where `REQUIRE` says so, it is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
SKIPPED = """
import pytest
def test_films():
    pytest.skip("the real films are absent")
def test_other():
    pytest.skip("no GPU")
@pytest.mark.xfail(reason="the real films")
def test_expected():
    assert False
"""
WHOLE_FILE = """
import pytest
pytest.importorskip("no_such_package")
"""


@pytest.mark.parametrize(
    ("required", "outcome"),
    [
        ("elsewhere", "3 skipped, 1 xfailed"),
        ("real films|no_such", "1 failed, 1 skipped, 1 xfailed, 1 error"),
        pytest.param("1", "2 failed, 1 xfailed, 1 error", marks=pytest.mark.slow(seconds=3)),
    ],
)
def test_a_skip_that_is_required_is_a_failure(required: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    (tmp_path / "test_whole_file.py").write_text(WHOLE_FILE)
    environment = {**os.environ, "REQUIRE": required, "PYTHONPATH": str(CONFTEST.parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest"]
    command += ["--continue-on-collection-errors", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert outcome in done.stdout.splitlines()[-1], done.stdout[-2000:]
    assert (done.returncode == 0) == (required == "elsewhere")
