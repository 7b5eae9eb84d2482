"""Benchmarks are run by hand, so a name that moved would be missed until then: each of them is imported here."""

from __future__ import annotations

import importlib
import math
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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


def test_the_ablation_is_on_equal_terms(ablation: Any) -> None:
    """Steps of each group, schedule and weighting; not the largest phase, which is equal where nothing else is.

    FedDRA warms up twice a round: 40 encoder steps are worth 35.5, as those of FedAvg with 40, and 50 in all are worth
    41 of the alignment modules, FedAvg's 45.5.
    """
    spent = {name: terms(experiment) for name, experiment in ablation.variants().items()}
    full, total, encoders = (spent[name] for name in ("FedDRA", ablation.SAME_TOTAL, ablation.SAME_ENCODERS))
    assert (full.axes, total.axes, encoders.axes) == ((35.5, 50), (45.5, 50), (35.5, 40))
    assert full.full_rate["alignment"] == 41.0
    assert spent["FedDRA without two stages"].axes == total.axes
    assert {one.total for name, one in spent.items() if name != ablation.SAME_ENCODERS} == {50}
    assert {one.weighting for one in spent.values()} == {"uniform"}
    assert len({(one.schedule, one.batch_size) for one in spent.values()}) == 1
    starts = {experiment.model.init for experiment in ablation.variants().values()}
    assert len(starts) == 1


@pytest.mark.parametrize("other", ["total", "full_rate", "schedule", "batch_size", "weighting"])
def test_unequal_terms_are_refused(other: str, ablation: Any) -> None:
    spent = {name: terms(experiment) for name, experiment in ablation.variants().items()}
    ablation.refuse_unequal(spent)
    name = ablation.SAME_ENCODERS if other == "full_rate" else ablation.SAME_TOTAL
    changed: dict[str, Any] = {
        "total": 51, "full_rate": {"encoder": 36.5}, "schedule": ("adamw", 1e-3, 10, False, "reset"), "batch_size": 33,
        "weighting": "samples",
    }  # fmt: skip
    with pytest.raises(SystemExit, match=name):
        ablation.refuse_unequal(spent | {name: replace(spent[name], **{other: changed[other]})})


def test_the_interval_of_paired_differences_by_hand() -> None:
    """1, 2, 3: mean 2, deviation 1, so 4.303 / sqrt 3 to each side; one difference alone says nothing."""
    paired = runpy.run_path(str(BENCHMARKS / "common.py"))["paired"]
    assert paired([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3)))
    assert paired([0.0, 2.0]) == pytest.approx((1.0, 12.706))
    assert paired([5.0]) == (5.0, math.inf)
