"""Mutation testing of what decides a figure: `make mutants`. A mutant that no test notices shows what is not tested.

Every module of ``MODULES`` is changed in one place at a time (operators.py, sources.py); the fast tests that import it
and execute that place are run against the change (selection.py, bench.py). A mutant is killed when a test fails. One
that survives is either a gap in the tests or changes nothing that matters; the latter are listed in accepted.toml, each
with a reason. The score is killed / (all - accepted). The working tree is never written to: the changed source is only
ever in the memory of the process that tests it. What is known is kept in build/mutants, so that a second run judges
only what has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PACKAGE = ROOT / "custom" / "fedvlp"
RESULTS = ROOT / "build" / "mutants"
ACCEPTED = Path(__file__).with_name("accepted.toml")

MODULES = (
    "core/gate", "core/change", "core/aggregation", "core/server_state", "core/snapshots",
    "core/history", "federation/loop", "federation/codec", "methods/math/dro",
    "core/privacy", "methods/math/neighbours", "training/step", "evaluation/retrieval",
    "evaluation/classification", "evaluation/zero_shot", "evaluation/distortion", "methods/guidance",
    "methods/robust", "methods/feddra", "methods/fedrgb", "methods/mfedavg", "methods/car_mfl", "methods/softpull",
    "methods/selection", "objectives/convirt", "objectives/gloria", "objectives/mgca", "objectives/medclip",
    "objectives/bce", "objectives/creamfl_tasks", "flare/privacy_filters", "flare/privacy_budget",
    "flare/job_check", "flare/class_list", "flare/paths", "deploy/envelope", "deploy/site_config", "core/validate",
    "federation/site", "training/loop", "evaluation/intervals", "methods/ensemble",
)  # fmt: skip
"""Guards, losses, metrics, intervals, aggregation, codec, weights, privacy, selection, retrieval; a site's training."""

DRAWINGS = ("heat_map", "_heat_map", "write_curves")
"""Functions that lay out a figure: their numbers are a matter of taste, and they are not mutated."""

TUNING = ("BLOCK", "TILE", "BATCH", "EXACT_NUMEL", "PARK_BYTES", "STORED", "LARGEST", "ORDERS", "VALUES")
"""Constants that decide how much is done or tried at a time: speed, memory and last bits, and no figure."""

WHOLE_RUNS = ("test_golden", "test_schedules", "test_learning", "test_presets", "test_runs", "test_simulator")
"""Test files that run whole experiments: too slow, and too far away, to judge one changed line."""


def file_of(module: str) -> Path:
    """The source of ``module`` ("federation/codec"). Raises FileNotFoundError."""
    path = PACKAGE / f"{module}.py"
    if not path.is_file():
        raise FileNotFoundError(f"no module {module!r} in {PACKAGE.name}; correct MODULES of the mutation tests")
    return path


def dotted(module: str) -> str:
    """Its name for an import."""
    return f"{PACKAGE.name}.{module.replace('/', '.')}"


def digest(paths: Iterable[Path]) -> str:
    """A short hash of the contents of files."""
    known = hashlib.sha256()
    for path in paths:
        known.update(path.read_bytes() if path.is_file() else b"gone")
    return known.hexdigest()[:16]
