"""The fast way to judge mutants: tests are collected once, and every run is a fork in which they stand ready.

There the functions that a mutant changes get their new code in place. Values that were computed while tests were
collected are those of the unchanged module, so a mutant that survives here, though its lines ran then too, is judged
again from the start (bench.judge), and so is one that changes what happens on import.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from mutants import ROOT, file_of
from mutants.bench import ARGUMENTS, NOT_HERE, UNDECIDED, Chosen, Job, Verdict, in_fork, judge, same_examples
from mutants.selection import Case

OPTIMIZED = 0x1
"""The flag of a function's code; that of a module or class body does not have it."""


def differences(module: str, source: str) -> list[tuple[CodeType, CodeType]] | None:
    """The functions that differ, before and after; None where the module does something else on import."""
    path = file_of(module)
    before = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    try:
        return list(_differing(before, compile(source, str(path), "exec", dont_inherit=True)))
    except _OnImportError:
        return None


class _OnImportError(Exception):
    pass


def _differing(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Walks through the bodies of a module and its classes."""
    plain = [[one for one in body.co_consts if not isinstance(one, CodeType)] for body in (before, after)]
    codes = [[one for one in body.co_consts if isinstance(one, CodeType)] for body in (before, after)]
    same = before.co_code == after.co_code and before.co_names == after.co_names and repr(plain[0]) == repr(plain[1])
    if not same or len(codes[0]) != len(codes[1]):
        raise _OnImportError
    for one, other in zip(*codes, strict=True):
        if not one.co_flags & OPTIMIZED:
            yield from _differing(one, other)
        elif one != other:
            yield one, other


class Stage(Chosen):
    """A pytest plugin: instead of running the tests, judges jobs in forks and writes each verdict as a line of JSON."""

    def __init__(self, module: str, jobs: Sequence[Job], tests: Sequence[Case], workers: int, answers: int) -> None:
        super().__init__(tests)
        self.module, self.jobs, self.workers, self.answers = module, jobs, workers, answers
        self.items: dict[str, pytest.Item] = {}
        self.functions: dict[CodeType, list[FunctionType]] = {}
        self.trusted: dict[str, bool] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename == str(file_of(self.module)):
                self.functions.setdefault(one.__code__, []).append(one)
        gc.collect()
        gc.freeze()
        places = {id(job.label): place for place, job in enumerate(self.jobs)}
        for job, verdict in judge(self.jobs, self.workers, self._one):
            killer = verdict.killer if self._is_trusted(verdict.killer) else UNDECIDED
            os.write(self.answers, (json.dumps([places[id(job.label)], killer]) + "\n").encode())
        return True

    def _is_trusted(self, killer: str) -> bool:
        """Whether a test passes here as long as nothing is changed."""
        if killer in self.items and killer not in self.trusted:
            alone = Job(self.module, [Case(killer, 60.0, frozenset())])
            self.trusted[killer] = not any(verdict.killed for _, verdict in judge([alone], 1, self._one))
        return self.trusted.get(killer, True)

    def _one(self, job: Job) -> int:
        """Starts a job's tests in a fork with the functions that it changes; its id."""

        def run() -> int:
            pairs = differences(job.module, job.source) if job.source is not None else []
            if pairs is None or not all(self.functions.get(before) for before, _ in pairs):
                return NOT_HERE
            for before, after in pairs:
                for function in self.functions[before]:
                    function.__code__ = after
            self._play(job)
            (job.folder / "found").write_text(json.dumps(self.killer))
            return 1 if self.killer else 0

        return in_fork(job.folder, run)

    def _play(self, job: Job) -> None:
        """Runs the job's tests until one fails."""
        items = [self.items[test.name] for test in job.tests if test.name in self.items]
        items[0].config._tmp_path_factory._given_basetemp = job.folder / "tmp"  # type: ignore[attr-defined]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.killer:
                return


def staged(module: str, jobs: Sequence[Job], tests: Sequence[Case], workers: int) -> Iterator[tuple[Job, Verdict]]:
    """Judges jobs of one module; yields each as soon as it is decided, and at the end those that could not be."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-stage-"))
    reading, writing = os.pipe()
    files = dict.fromkeys(str(ROOT / test.file) for test in tests)

    def run() -> int:
        os.close(reading)
        same_examples()
        plugin = Stage(module, jobs, tests, workers, writing)
        return int(pytest.main([*ARGUMENTS, "-s", "--basetemp", str(folder / "tmp"), *files], plugins=[plugin]))

    process = in_fork(folder, run)
    os.close(writing)
    left = dict(enumerate(jobs))
    with os.fdopen(reading) as answers:
        for line in answers:
            place, killer = json.loads(line)
            yield left.pop(place), Verdict(killer)
    os.waitpid(process, 0)
    if left:
        said = (folder / "output").read_text(errors="replace")[-1000:]
        print(f"    {module}: {len(left)} mutants were not judged the fast way: {said}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    for job in left.values():
        yield job, Verdict(UNDECIDED)
