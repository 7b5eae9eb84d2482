"""Runs the cells of a scenario, one run folder each; what was finished is read, what was stopped goes on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from fedvlp.claims.scenario import Figures, Scenario, Table
from fedvlp.run.config import fingerprint
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

Said = Callable[[str, int, bool], None]
"""Called with method, seed and whether the cell was finished already."""


def measured(
    scenario: Scenario, methods: Sequence[str], seeds: Sequence[int], root: Path, jobs: int, said: Said
) -> Table:
    """The figures of every method with every seed, ``jobs`` cells at a time. Stopped and started again, it goes on.

    The runs are in ``<root>/<scenario>/<seed>/<method>/``. Raises what a run raises, after the others have ended.
    """
    cells = {
        (method, seed): replace(scenario.experiments(seed)[method], name=method) for seed in seeds for method in methods
    }
    folders = {cell: root / scenario.name / str(cell[1]) for cell in cells}
    wanted: dict[tuple[str, int], Experiment] = {}
    for cell, experiment in cells.items():
        if finished(folders[cell], experiment):
            said(*cell, True)
        else:
            wanted[cell] = experiment
    if wanted:
        # fresh interpreters: a process that has run several threads must not be forked
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(train, folders[cell], one): cell for cell, one in wanted.items()}
            for future in as_completed(running):
                future.result()
                said(*running[future], False)
    return Table({cell: figures_of(scenario, folders[cell], experiment) for cell, experiment in cells.items()})


def train(root: Path, experiment: Experiment) -> None:
    """Runs or resumes one cell."""
    simulate(experiment, RunFolder.open(root, experiment))


def finished(root: Path, experiment: Experiment) -> RunFolder | None:
    """The finished run of this very configuration, if there is one."""
    wanted = fingerprint(experiment.pinned())  # a run's own configuration has the checksum of what it starts from
    for path in sorted((root / experiment.name).glob("[0-9]*")):
        folder = RunFolder(path)
        if folder.model.exists() and fingerprint(folder.experiment()) == wanted:
            return folder
    return None


def figures_of(scenario: Scenario, root: Path, experiment: Experiment) -> Figures:
    """The figures of a finished cell."""
    folder = finished(root, experiment)
    assert folder is not None
    return scenario.figures(folder)


def methods_of(scenario: Scenario, papers: Sequence[str]) -> list[str]:
    """The methods that the claims of these papers, and what must be so before, are about: all of the scenario's."""
    known: Mapping[str, Experiment] = scenario.experiments(0)
    return list(known) if any(claim.paper in papers for claim in scenario.claims) else []
