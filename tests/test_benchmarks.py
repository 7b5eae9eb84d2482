"""Benchmarks are run by hand, so a name that moved would be missed until then: each of them is imported here."""

from __future__ import annotations

import importlib
import math
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedvlp.claims.ledger import alignment
from fedvlp.run.terms import terms

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_every_benchmark_finds_what_it_imports() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert len(names) > 15
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("ablation")
    for name in ("ablation", "common"):
        sys.modules.pop(name, None)


def test_the_ablation_leaves_out_every_set_of_parts_once(ablation: Any) -> None:
    """Two stages, constraint, robust weights: 2 x 2 x 2; the ledger's own rows by the ledger's names."""
    rows = ablation.experiments("label-skew", "parts", 3)
    ledger = alignment("label-skew", 3)
    assert len({repr(one.method) for one in rows.values()}) == len(rows) == 8
    for name in ("feddra", "feddra-one-stage", "feddra-no-constraint", "feddra-no-dro"):
        assert rows[name] == ledger[name]
    bare: Any = rows["feddra-one-stage-no-constraint-no-dro"].method
    assert (bare.align_steps, bare.mu, bare.rho) == (0, 0.0, 0.0)
    assert {terms(one).axes[0] for one in rows.values()} == {terms(ledger["fedavg"]).axes[0]}


@pytest.mark.parametrize(("vary", "values"), [("mu", [5.0, 1.0, 10.0]), ("rho", [0.1, 0.01, 1.0])])
def test_the_grids_are_the_papers_and_the_ledgers_setting_is_its_own_row(
    vary: str, values: list[float], ablation: Any
) -> None:
    rows = ablation.experiments("scanner-shift", vary, 100)
    assert [getattr(one.method, vary) for one in rows.values()] == values
    assert rows["feddra"] == alignment("scanner-shift", 100)["feddra"]


def test_rows_of_unequal_encoder_steps_are_refused(ablation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ablation.PARTS, "one-stage", {"local_steps": 39})
    with pytest.raises(SystemExit, match="full-rate steps of the encoders differ"):
        ablation.experiments("scanner-shift", "parts", 0)


def test_the_interval_of_paired_differences_by_hand() -> None:
    """1, 2, 3: mean 2, deviation 1, so 4.303 / sqrt 3 to each side; one difference alone says nothing."""
    paired = runpy.run_path(str(BENCHMARKS / "common.py"))["paired"]
    assert paired([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3)))
    assert paired([0.0, 2.0]) == pytest.approx((1.0, 12.706))
    assert paired([5.0]) == (5.0, math.inf)
