"""Runs tests against a module, changed or not, in a process of their own that begins warm.

The parent imports what takes long (torch, pytest and whatever else the tests were seen to import) and nothing of this
package; every run is a fork of it. So a run costs its tests and little else, and whatever a mutant breaks ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from mutants import PACKAGE, RESULTS, ROOT, TESTS, dotted, file_of
from mutants.selection import Case

MEMORY = 8 << 30
"""Bytes of data a run may have; a mutant may ask for absurd shapes."""

PATIENCE = 20.0
"""Seconds a run may take beyond three times what its tests take without a mutation."""

NOT_HERE = 99
"""How a run ends that cannot judge its mutant in this way."""

FAULT = 70
"""How a run ends in which something else than a test raised."""

ARGUMENTS = (
    "-q", "--tb=no", "--no-header", "--no-summary", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "-o",
    "addopts=--import-mode=importlib", "--rootdir", str(ROOT),
)  # fmt: skip


UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """``killer``: the test that failed, or what else ended the run; empty if every test passed, or ``UNDECIDED``."""

    killer: str
    by_machine: bool = False  # the run was ended by a signal or by its time limit, and not by a test

    @property
    def killed(self) -> bool:
        return self.killer not in ("", UNDECIDED)


@dataclass
class Job:
    """Tests to run against ``source`` in place of the module's own (None: as it is)."""

    module: str
    tests: list[Case]
    source: str | None = None
    label: Any = None
    folder: Path = Path()  # of the run, which is removed after it
    deadline: float = 0.0

    @property
    def limit(self) -> float:
        return PATIENCE + 3 * sum(test.seconds for test in self.tests)


class Changed(importlib.machinery.SourceFileLoader, importlib.abc.MetaPathFinder):
    """Gives a module other source text than its file has; nothing is written, no compiled file either."""

    def __init__(self, module: str, source: str) -> None:
        super().__init__(dotted(module), str(file_of(module)))
        self.changed = source

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.changed, self.path, "exec", dont_inherit=True)


class Chosen:
    """A pytest plugin: runs only the chosen tests, in their order, and notes the first that fails."""

    def __init__(self, tests: Iterable[Case]) -> None:
        self.order = {test.name: place for place, test in enumerate(tests)}
        self.killer = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        there = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(there, key=lambda item: self.order[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.killer = self.killer or report.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.killer = self.killer or report.nodeid

    def found(self) -> Any:
        return self.killer


class Watched:
    """A pytest plugin: notes of every test how long it takes and which lines of one file it executes.

    Lines that run when a test file is imported count for all its tests, those of a shared fixture for all its users.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.lines: set[int] = set()
        self.by_file: dict[str, set[int]] = {}
        self.by_fixture: dict[int, set[int]] = {}
        self.tests: dict[str, dict[str, Any]] = {}
        self.broken: list[str] = []
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self.path:
            return None
        self.lines.add(frame.f_lineno)
        return self._trace

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        self.lines = set()
        report = yield
        self.by_file.setdefault(collector.nodeid.partition("::")[0], set()).update(self.lines)
        if report.failed:
            self.broken.append(collector.nodeid)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        before, self.lines = self.lines, set()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.by_fixture.setdefault(id(fixturedef), set()).update(self.lines)
            self.lines |= before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.lines, began = set(), time.perf_counter()
        done = yield
        shared = [self.by_fixture.get(id(one), set()) for all_ in _fixtures(item) for one in all_]
        lines = self.lines.union(*shared, self.by_file.get(item.nodeid.partition("::")[0], set()))
        self.tests[item.nodeid] = {"seconds": time.perf_counter() - began, "lines": sorted(lines)}
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.broken.append(report.nodeid)

    def found(self) -> Any:
        sys.settrace(None)
        collected = set().union(*self.by_file.values())
        modules = sorted(filter(_foreign, sys.modules))
        return {"tests": self.tests, "broken": self.broken, "collected": sorted(collected), "modules": modules}


def _fixtures(item: Any) -> list[Any]:
    return list(item._fixtureinfo.name2fixturedefs.values()) if hasattr(item, "_fixtureinfo") else []


def _foreign(name: str) -> bool:
    """Whether a module may be imported before the package is: it is neither of the package nor of the tests."""
    origin = getattr(sys.modules[name], "__file__", None)
    inside = origin is not None and (TESTS in Path(origin).parents or PACKAGE in Path(origin).parents)
    return name.split(".")[0] not in (PACKAGE.name, "__main__", "mutants") and not inside


def warm(modules: Iterable[str]) -> None:
    """Imports them here, for all later runs, in which the collector of garbage need not look at them again."""
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(RESULTS / "bytecode")
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def watch(module: str, files: Sequence[Path], limit: float = 1800.0) -> dict[str, Any]:
    """All fast tests of ``files``, run without a mutation and watched. Raises RuntimeError if they cannot be."""
    job = Job(module, [], folder=Path(tempfile.mkdtemp(prefix="mutants-")))
    process = _fork(job, [str(file) for file in files], lambda: Watched(file_of(module)))
    job.deadline = time.monotonic() + limit
    while True:
        ended, _ = os.waitpid(process, os.WNOHANG)
        if ended or time.monotonic() > job.deadline:
            break
        time.sleep(0.05)
    _end(process, reaped=bool(ended))
    try:
        return json.loads((job.folder / "found").read_text())
    except FileNotFoundError:
        said = (job.folder / "output").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{module}: its tests do not run as they are: {said}") from None
    finally:
        shutil.rmtree(job.folder, ignore_errors=True)


def judge(
    jobs: Iterable[Job], workers: int, start: Callable[[Job], int] | None = None
) -> Iterator[tuple[Job, Verdict]]:
    """Runs the jobs, ``workers`` at a time, and yields each as soon as it is decided.

    A busy machine, or one without memory, ends runs of mutants that no test kills. So a run that a signal or its time
    limit ended is made once more, alone, when all others are through, and what is seen then counts. ``start`` begins a
    run in a process of its own, whose id it returns; by default in a fork of this one.
    """
    doubtful = []
    for job, verdict in _judged_once(jobs, workers, start or _start):
        if verdict.by_machine:
            doubtful.append(job)
        else:
            yield job, verdict
    yield from _judged_once(doubtful, 1, start or _start)


def _judged_once(jobs: Iterable[Job], workers: int, start: Callable[[Job], int]) -> Iterator[tuple[Job, Verdict]]:
    """What the first run of each says."""
    waiting, running = iter(jobs), {}
    while True:
        while len(running) < workers and (job := next(waiting, None)):
            job.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
            running[start(job)] = job
            job.deadline = time.monotonic() + job.limit
        if not running:
            return
        for process, job in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended or time.monotonic() > job.deadline:
                _end(process, reaped=bool(ended))
                del running[process]
                yield job, _verdict(job, status if ended else None)
                shutil.rmtree(job.folder, ignore_errors=True)
        time.sleep(0.002)


def _start(job: Job) -> int:
    files = dict.fromkeys(str(ROOT / test.file) for test in job.tests)
    return _fork(job, list(files), lambda: Chosen(job.tests))


def _verdict(job: Job, status: int | None) -> Verdict:
    if status is None:
        return Verdict(f"no end after {job.limit:.0f} s", by_machine=True)
    if os.WIFSIGNALED(status):
        return Verdict(f"the process died of signal {os.WTERMSIG(status)}", by_machine=True)
    code = os.waitstatus_to_exitcode(status)
    if code == NOT_HERE:
        return Verdict(UNDECIDED)
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Verdict("")
    if code == FAULT:
        said = (job.folder / "output").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{job.module}: the mutation tests themselves went wrong: {said}")
    with contextlib.suppress(FileNotFoundError):
        return Verdict(json.loads((job.folder / "found").read_text()) or f"pytest ended with {code}")
    return Verdict(f"the process ended with {code}")


def _fork(job: Job, files: list[str], plugin: Callable[[], Any]) -> int:
    """Starts pytest on ``files`` in a new process; its id. What the plugin found will be in the job's folder."""

    def run() -> int:
        if job.source is not None:
            sys.meta_path.insert(0, Changed(job.module, job.source))
        same_examples()
        watcher = plugin()
        first = ["-x"] if job.tests else []  # one failing test is enough; without a mutation all are of interest
        code = pytest.main([*ARGUMENTS, *first, "--basetemp", str(job.folder / "tmp"), *files], plugins=[watcher])
        (job.folder / "found").write_text(json.dumps(watcher.found()))
        return int(code)

    return in_fork(job.folder, run)


def in_fork(folder: Path, run: Callable[[], int]) -> int:
    """Starts ``run`` in a new process, in ``folder`` and with its output there; the id. What it returns is its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = FAULT
    try:
        os.setsid()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(folder)
        code = run()
        sys.stdout.flush()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def same_examples() -> None:
    """hypothesis draws the same examples in every run, without limits of time: only a failing test kills."""
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )  # fmt: skip
    settings.load_profile("mutants")


def _end(process: int, reaped: bool) -> None:
    """Ends the run's process and whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if not reaped:
        os.waitpid(process, 0)
