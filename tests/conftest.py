"""Shared by all tests: one thread (so the same last bits everywhere), time limits, repeated starts."""

from __future__ import annotations

import atexit
import gc
import locale
import os
import random
import re
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.main import get_command

# before torch is imported: also programs that tests start; two threads each on busy cores wait for each other
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import torch

sys.path.append(str(Path(__file__).parent))

from support.simulator import REPEATED

from fedvlp.data.burned_in import holds_text
from fedvlp.data.cohort import Cohort
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort

gc.disable()  # until every file is collected: what they import stays, and looking through it is a third of the time
atexit.register(gc.unfreeze)

if "LOCALE" in os.environ:  # as a program that reads the person's settings: an unknown one is an error
    locale.setlocale(locale.LC_ALL, os.environ["LOCALE"])
    locale.setlocale(locale.LC_MESSAGES, "C")  # tests look for what the system says in English

SLOW_SECONDS = 900
"""The time limit of a test marked slow; that of others is in pyproject.toml."""

START_REPEATED = "FLARE start repeated"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_record_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The key for record ids that tests, and programs that they start, make is none of this user's."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    """Programs that tests start can be interrupted also where the shell started pytest in the background."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


DRAWN: dict[tuple[SyntheticCohort, int], Any] = {}
"""Films of the synthetic cohort that this process has drawn."""


@pytest.fixture(autouse=True)
def _films_drawn_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A film is drawn once a process, not once a test; but for the tests of the drawing itself."""
    build = SyntheticCohort.build

    def remembering(spec: SyntheticCohort) -> Cohort:
        cohort = build(spec)

        def images(rows: np.ndarray) -> np.ndarray:
            keys = [(spec, row) for row in np.atleast_1d(rows).tolist()]
            new = [key for key in keys if key not in DRAWN]
            DRAWN.update(zip(new, cohort.images(np.array([row for _, row in new], np.int64)), strict=True))
            return np.stack([DRAWN[key] for key in keys]) if keys else cohort.images(rows)

        return replace(cohort, images=images)

    if "synthetic" not in request.path.parts:
        monkeypatch.setattr(SyntheticCohort, "build", remembering)


@pytest.fixture(autouse=True, scope="session")
def _films_searched_once() -> Iterator[None]:
    """Tesseract takes some 20 ms for a film, and the same ones are read in test after test."""
    searched: dict[tuple[Any, bytes], bool] = {}

    def remembering(pixels: np.ndarray) -> bool:
        key = pixels.shape, sha256(np.ascontiguousarray(pixels)).digest()
        if key not in searched:
            searched[key] = holds_text(pixels)
        return searched[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedvlp.data.images.holds_text", remembering)
        yield


@pytest.fixture(autouse=True)
def _small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test downloads, and none depends on where runs are kept on this machine."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("FEDVLP_HOME", raising=False)


@pytest.fixture(autouse=True, scope="session")
def _command_line_built_once() -> Iterator[None]:
    """Typer makes 40 commands of their functions at every call, which takes longer than most mistakes to be refused."""
    built: dict[tuple[typer.Typer, int], Any] = {}

    def size(app: typer.Typer) -> int:
        """Commands: some are added while a process runs (cli/laboratory.py)."""
        inner = (group.typer_instance for group in app.registered_groups)
        return len(app.registered_commands) + sum(size(one) for one in inner if one)

    def once(app: typer.Typer) -> Any:
        key = app, size(app)
        return built[key] if key in built else built.setdefault(key, get_command(app))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", once)
        patch.setattr("typer.testing._get_command", once)
        yield


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Time limits; and the longest of the slow tests first, so that no worker is left alone with one at the end."""
    expected: dict[str, float] = {}
    for item in items:
        slow = item.get_closest_marker("slow")
        expected[item.nodeid] = slow.kwargs.get("seconds", 30.0) if slow else 0.0
        if slow:
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    if seed := os.environ.get("RANDOM_ORDER"):  # the same for all workers: files, and the tests in each
        draw = random.Random(seed)
        of_file = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (of_file[item.path], draw.random()))
    items.sort(key=lambda item: -expected[item.nodeid])


SHARING = (
    "training/test_distributed.py", "protocols/test_distortion.py", "faults/test_consortium.py",
    "flare/test_provisioned.py", "flare/test_perimeter.py", "flare/test_smoke.py", "methods/test_device.py",
    "studies/test_cells.py", "run/test_audit.py", "attacks/test_measured.py", "cli/test_mistakes.py",
    "studies/test_towers.py", "studies/test_reproduce.py", "models/export/test_monai_bundle.py",
)  # fmt: skip
"""Files whose tests share a fixture that takes long: one worker takes them all, or all whose ids begin "<group>: "."""


def work_unit(nodeid: str, fast: bool = False) -> str:
    """What one worker takes as a whole: a test, or the tests of a file (of a group of it) that share a fixture.

    Where the slow ones are left out, any file: what it imports, draws and sets up would else be made in every worker.
    """
    file, _, rest = nodeid.partition("::")
    if fast:
        return file
    if not file.endswith(SHARING):
        return nodeid
    _, _, identifier = rest.partition("[")
    group, found, _ = identifier.partition(": ")
    return f"{file}:{group}" if found else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out work units in order. (xdist's own groups do nothing with this pytest, which ignores its node ids.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByWorkUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid, config.option.markexpr == "not slow")

    config.option.loadscopereorder = False
    return ByWorkUnit(config, log)


def fail_where_required(report: pytest.TestReport | pytest.CollectReport) -> None:
    """With ``REQUIRE=1`` a skip is a failure; with a regular expression, a skip whose reason it finds."""
    required = os.environ.get("REQUIRE", "")
    if not required or not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return
    reason = report.longrepr[2]
    if required == "1" or re.search(required, reason):
        report.outcome = "failed"
        report.longrepr = f"REQUIRE={required} and this was skipped: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes in the test's report which FLARE starts it, or a fixture made for it, had to repeat."""
    report = yield
    fail_where_required(report)
    while REPEATED:
        report.user_properties.append((START_REPEATED, REPEATED.pop()))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole file can be skipped, while it is collected."""
    report = yield
    fail_where_required(report)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts the repeated starts: a repetition is no failure, and never silent."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    repeated = [
        f"{report.nodeid}: {said}"
        for report in reports
        for name, said in getattr(report, "user_properties", ())
        if name == START_REPEATED
    ]
    if repeated:
        terminalreporter.section(f"{len(repeated)} FLARE starts were repeated, as their port was taken")
        for line in repeated:
            terminalreporter.write_line(line)
