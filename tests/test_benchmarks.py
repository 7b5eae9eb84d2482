"""Benchmarks are run by hand, so a name that moved would be missed until then: each of them is imported here."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_every_benchmark_finds_what_it_imports() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert len(names) > 15
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_interval_of_paired_differences_by_hand() -> None:
    """1, 2, 3: mean 2, deviation 1, so 4.303 / sqrt 3 to each side; one difference alone says nothing."""
    paired = runpy.run_path(str(BENCHMARKS / "common.py"))["paired"]
    assert paired([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3)))
    assert paired([0.0, 2.0]) == pytest.approx((1.0, 12.706))
    assert paired([5.0]) == (5.0, math.inf)
