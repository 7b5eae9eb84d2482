"""Runs the cells of a scenario, one run folder each; what was finished is read, what was stopped goes on.

The figures of a finished cell are also in a file (claims/results.py), which outlasts its run.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from fedvlp.claims import results
from fedvlp.claims.scenario import Figures, Origin, Scenario, Table
from fedvlp.data.deid import Accepted
from fedvlp.run.config import fingerprint
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

DONE, HERE, FILED = "done", "there already", "in the results"
"""What became of a cell: it was run now, its run was finished, or its figures are in a file."""

Said = Callable[[str, int, str], None]
"""Called with method, seed and one of these."""

Cells = dict[tuple[str, int], Experiment]
"""(method, seed) -> its experiment."""


def cells_of(scenario: Scenario, methods: Sequence[str], seeds: Sequence[int], device: str = "") -> Cells:
    """The experiments of the cells, each named as its method; on ``device`` (``training.device``) if one is named."""
    cells = {
        (method, seed): replace(scenario.experiments(seed)[method], name=method) for seed in seeds for method in methods
    }
    return {cell: results.on_device(one, device) for cell, one in cells.items()} if device else cells


def measured(
    scenario: Scenario,
    cells: Cells,
    root: Path,
    files: Path,
    jobs: int,
    said: Said,
    accept_phi_risk: Accepted = False,
) -> Table:
    """The figures of the cells: from ``files`` (claims/results.py), from finished runs, or of runs that begin now.

    ``jobs`` cells run at a time; stopped and started again, it goes on. With ``jobs`` 0 nothing is run, and the cells
    that have not finished are not in the table. ``accept_phi_risk`` is that of ``run.simulate``. The runs are in
    ``<root>/<scenario>/<seed>/<method>/``, and what has finished is written to ``files``. A figure is the same whether
    it was measured now or read from its file. Raises what a run raises, after the others have ended.
    """
    figures: dict[tuple[str, int], Figures] = {}
    origins: dict[tuple[str, int], Origin] = {}
    wanted: Cells = {}

    def noted(cell: tuple[str, int], one: Measured) -> None:
        path, measures, seconds = one
        figures[cell] = results.save(results.path(files, scenario.name, *cell), RunFolder(path), measures, seconds)

    for cell, experiment in cells.items():
        filed = results.load(results.path(files, scenario.name, *cell), experiment)
        run = None if filed else finished(_folder(scenario, root, cell), experiment)
        if filed:
            figures[cell], origins[cell] = filed
            said(*cell, FILED)
        elif run:
            noted(cell, measure(run.path, scenario.figures))
            said(*cell, HERE)
        else:
            wanted[cell] = experiment
    tasks = {
        cell: (_folder(scenario, root, cell), one, scenario.figures, accept_phi_risk) for cell, one in wanted.items()
    }
    for cell, one in _run(tasks, jobs):
        noted(cell, one)
        said(*cell, DONE)
    return Table({cell: figures[cell] for cell in cells if cell in figures}, origins)


Measured = tuple[Path, Figures, float]
"""Folder of a finished run, its figures, and the seconds that measuring them took."""

Task = tuple[Path, Experiment, Callable[[RunFolder], Figures], Accepted]
"""Arguments of ``train``."""


def _run(tasks: Mapping[tuple[str, int], Task], jobs: int) -> Iterator[tuple[tuple[str, int], Measured]]:
    """Runs ``jobs`` cells at a time, and yields each as it ends. One at a time runs in this very process."""
    if jobs == 1:
        yield from ((cell, train(*task)) for cell, task in tasks.items())
    elif tasks and jobs:
        # fresh interpreters: a process that has run several threads must not be forked
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, context, initializer=_end_with, initargs=(os.getpid(),)) as pool:
            running = {pool.submit(train, *task): cell for cell, task in tasks.items()}
            for future in as_completed(running):
                yield running[future], future.result()


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent: one that trained on would hold its run when the table is resumed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _folder(scenario: Scenario, root: Path, cell: tuple[str, int]) -> Path:
    return root / (scenario.runs or scenario.name) / str(cell[1])


def train(
    root: Path, experiment: Experiment, figures: Callable[[RunFolder], Figures], accept_phi_risk: Accepted = False
) -> Measured:
    """Runs or resumes one cell, and measures it."""
    folder = RunFolder.open(root, experiment)
    simulate(experiment, folder, accept_phi_risk=accept_phi_risk)
    return measure(folder.path, figures)


def measure(path: Path, figures: Callable[[RunFolder], Figures]) -> Measured:
    """The figures of a finished run."""
    began = time.perf_counter()
    measured = figures(RunFolder(path))
    return path, measured, time.perf_counter() - began


def finished(root: Path, experiment: Experiment) -> RunFolder | None:
    """The finished run of this very configuration, if there is one."""
    wanted = fingerprint(experiment.pinned())  # a run's own configuration has the checksum of what it starts from
    for path in sorted((root / experiment.name).glob("[0-9]*")):
        folder = RunFolder(path)
        if folder.model.exists() and fingerprint(folder.experiment()) == wanted:
            return folder
    return None


def methods_of(scenario: Scenario, papers: Sequence[str]) -> list[str]:
    """The methods that the claims of these papers, and what must be so before, are about: all of the scenario's."""
    known: Mapping[str, Experiment] = scenario.experiments(0)
    return list(known) if any(claim.paper in papers for claim in scenario.claims) else []
