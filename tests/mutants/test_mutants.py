"""The mutation tests' own tools: what is changed and what is not, and which tests a change concerns."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from mutants import ROOT, file_of
from mutants.bench import Job, in_fork, judge
from mutants.records import accepted
from mutants.selection import BUDGET, Case, chosen, files_for
from mutants.sources import mutants_of

pytestmark = pytest.mark.slow(seconds=1)
"""The tool is run by hand."""

SOURCE = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

BLOCK = 1 << 4


class Guard(Protocol):
    def guard(self, count: int, least: int = 2) -> bool: ...


@dataclass(frozen=True)
class Settings:
    size: int | None = 3  # documented

    def guard(self, count: int | None, *, least: int = 2) -> bool:
        """Says 1 + 1."""
        require(count > least, f"count is {count - 1}")
        logger.info("%d", count + 1)
        if count == 5:
            raise ValueError("5" * 2)
        return count in (7,)
'''

EXPECTED = [
    ("@dataclass(frozen=True) class Settings:", "class Settings:"),
    ('require(count > least, f"count is {count - 1}")', "pass"),
    ('require(count > least, f"count is {count - 1}")', 'require(count >= least, f"count is {count - 1}")'),
    ("if count == 5:", "if not count == 5:"),
    ("if count == 5:", "if count == 6:"),
    ("if count == 5:", "if count == 4:"),
    ("if count == 5:", "if count != 5:"),
    ("return count in (7,)", "return count in ( 8,)"),
    ("return count in (7,)", "return count in ( 6,)"),
    ("return count in (7,)", "return count not in (7,)"),
]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of one module with ``SOURCE``."""
    from mutants import sources

    (tmp_path / "one.py").write_text(SOURCE)
    monkeypatch.setattr(sources, "file_of", lambda module: tmp_path / f"{module}.py")
    monkeypatch.setattr(sources, "RESULTS", tmp_path / "results")
    return "one"


def test_only_what_decides_something_is_changed(module: str) -> None:
    """No annotation, default, message, log, tuning constant or documentation; no change that means the same."""

    found = mutants_of(module)
    assert [(mutant.before, mutant.after) for mutant in found] == EXPECTED
    assert mutants_of(module) == found, "read back from disk"


def test_a_mutant_is_the_module_with_this_one_change(module: str) -> None:

    lines = SOURCE.splitlines()
    for mutant in mutants_of(module)[1:]:
        changed = [(old, new) for old, new in zip(lines, mutant.source().splitlines(), strict=True) if old != new]
        assert [(old.strip(), new.strip()) for old, new in changed] == [(mutant.before, mutant.after)]
        assert lines[mutant.line - 1].strip() == mutant.before


def test_a_change_concerns_the_lines_that_run_it(module: str) -> None:
    """Of the class nothing in particular, as it acts on import; of a condition its own line, not what it guards."""

    place = {line.strip(): number for number, line in enumerate(SOURCE.splitlines(), 1)}
    reach = {mutant.before: mutant.reach for mutant in mutants_of(module)}
    assert reach["@dataclass(frozen=True) class Settings:"] == ()
    assert reach["if count == 5:"] == (place["if count == 5:"],)


def test_tests_that_run_a_changed_line_judge_it_fast_ones_first() -> None:
    """a.py is the module's own file: all its tests count; of others those within the budget, the slowest left out."""
    tests = [
        Case("b.py::slow", BUDGET, frozenset({4})), Case("b.py::fast", 0.2, frozenset({3, 4})),
        Case("a.py::slow", 2 * BUDGET, frozenset({4})), Case("a.py::fast", 0.1, frozenset({4})),
        Case("a.py::elsewhere", 0.1, frozenset({9})),
    ]  # fmt: skip
    names = [test.name for test in chosen(tests, (4, 5), {"a.py"})]
    assert names == ["a.py::fast", "a.py::slow", "b.py::fast"]
    assert len(chosen(tests, (), {"a.py"})) == 4, "what acts on import concerns every test"


def test_a_modules_own_test_file_comes_first_and_names_passed_on_count() -> None:
    """``from fedvlp.methods import FedRGB`` imports fedvlp.methods.fedrgb."""
    found = [path.relative_to(ROOT).as_posix() for path in files_for("methods/fedrgb")]
    assert found[0] == "tests/methods/test_fedrgb.py"
    assert "tests/federation/test_codec.py" in found
    assert "tests/methods/math/test_neighbours.py" not in found


def test_functions_are_exchanged_in_place_unless_import_does_something_else() -> None:
    from mutants.stage import differences

    text = file_of("methods/math/neighbours").read_text()
    changed = text.replace("alpha=-2", "alpha=-3")
    found = differences("methods/math/neighbours", changed)
    assert found is not None
    assert [before.co_name for before, _ in found] == ["nearest"]
    assert differences("methods/math/neighbours", text) == []
    assert differences("methods/math/neighbours", text.replace("TILE = 1024", "TILE = 1025")) is None
    assert differences("methods/math/neighbours", text + "\nnearest.__doc__ = None\n") is None


@pytest.mark.parametrize("ends", [(True, False), (True, True), (False,)])
def test_a_run_that_the_machine_ended_is_judged_once_more(
    ends: tuple[bool, ...],
) -> None:
    """SIGKILL of a machine without memory had counted as a test that failed, and was kept. ``ends``: each run's end."""
    jobs = [Job("a", [], label="it"), Job("a", [], label="other")]
    begun: list[str] = []

    def start(job: Job) -> int:
        begun.append(job.label)
        is_ended = job.label == "it" and ends[begun.count("it") - 1]

        def run() -> int:
            if is_ended:
                os.kill(os.getpid(), signal.SIGKILL)
            return 0

        return in_fork(job.folder, run)

    found = {job.label: verdict.killer for job, verdict in judge(jobs, 1, start)}
    assert found == {"it": "the process died of signal 9" if all(ends) else "", "other": ""}
    assert begun == (["it", "other", "it"] if len(ends) > 1 else ["it", "other"])


def test_a_run_that_went_on_for_too_long_is_judged_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from mutants import bench

    monkeypatch.setattr(bench, "PATIENCE", 2.0)
    waits = [60.0, 0.0]
    slow = Job("a", [])
    ((_, verdict),) = judge([slow], 1, lambda job: in_fork(job.folder, partial(_slept, waits.pop(0))))
    assert verdict.killer == ""


def _slept(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def test_every_module_to_be_mutated_exists_and_some_test_imports_it() -> None:
    from mutants import MODULES

    assert [module for module in MODULES if not files_for(module)] == []


def test_every_accepted_mutant_is_of_a_line_that_is_still_there() -> None:
    """An entry whose line has changed accepts nothing any more, and its reason may not hold for the new line."""
    sources: dict[str, str] = {}
    for module, _, _ in accepted():
        lines = file_of(module).read_text(encoding="utf-8").splitlines()
        sources.setdefault(module, " ".join(line.strip() for line in lines))
    gone = [(module, before) for module, before, _ in accepted() if before not in sources[module]]
    assert gone == []
