"""Run the cells of a table, a run folder each: reuse finished runs, resume interrupted ones.

The figures of a finished cell are also in a table (run/cell_results.py), which outlasts its run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from fedvlp.core.validate import require
from fedvlp.data.deid import Accepted
from fedvlp.run import plugins
from fedvlp.run.cell_results import CellResults, Figures, KnownRecords, Measure, Origin, Table, is_drawn
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import noted_cohort, simulate
from fedvlp.training.settings import take_gpu

DONE, HERE, FILED = "done", "there already", "in the results"
"""What became of a cell: it was run now, its run was finished, or its figures are in the results."""

Said = Callable[[str, int, str], None]
"""Called with method, seed and one of these."""

Cells = dict[tuple[str, int], Experiment]
"""(method, seed) -> its experiment."""


class Kind(Protocol):
    """What cells have in common: what is measured of each, and under which names runs and results are kept."""

    @property
    def name(self) -> str:
        """Of the folder of results."""

    @property
    def figures(self) -> Measure:
        """Measures a finished run."""

    @property
    def runs(self) -> str:
        """Of the folder of runs, for kinds that measure the same runs; "": ``name``."""


def measured(
    of: Kind,
    cells: Cells,
    root: Path,
    files: Path,
    jobs: int,
    said: Said,
    accept_phi_risk: Accepted = False,
) -> Table:
    """The figures of the cells: from ``files`` (run/cell_results.py), from finished runs, or of runs that begin now.

    ``jobs`` cells run at a time; stopped and started again, it goes on. With ``jobs`` 0 nothing is run, and the cells
    that have not finished are not in the table. ``accept_phi_risk`` is that of ``run.simulate``. The runs are in
    ``<root>/<scenario>/<seed>/<method>/``, and what has finished is written to ``files``. A figure is the same whether
    it was measured now or read there. Raises what a run raises: no other begins then, and those under way end
    and are written first.
    """
    figures: dict[tuple[str, int], Figures] = {}
    origins: dict[tuple[str, int], Origin] = {}
    wanted: Cells = {}
    records, results = KnownRecords(), CellResults(files, of.name)
    require(jobs >= 0, f"--jobs is {jobs}; give how many runs at a time, or 0 to run nothing")

    def noted(cell: tuple[str, int], one: Measured) -> None:
        path, measures, seconds = one
        figures[cell] = results.save(cell, RunFolder(path), measures, of.figures, seconds)

    for cell, experiment in cells.items():
        filed = results.load(cell, experiment, of.figures, records)
        run = None if filed else finished(_folder(of, root, cell), experiment, records)
        if filed:
            figures[cell], origins[cell] = filed
            said(*cell, FILED)
        elif run:
            noted(cell, measure(run.path, of.figures))
            said(*cell, HERE)
        else:
            wanted[cell] = experiment
    tasks = {cell: (_folder(of, root, cell), one, of.figures, accept_phi_risk) for cell, one in wanted.items()}
    with closing(_run(tasks, jobs)) as ended:
        for cell, one in ended:
            noted(cell, one)
            said(*cell, DONE)
    return Table({cell: figures[cell] for cell in cells if cell in figures}, origins)


Measured = tuple[Path, Figures, float]
"""Folder of a finished run, its figures, and the seconds that measuring them took."""

Task = tuple[Path, Experiment, Measure, Accepted]
"""Arguments of ``train``."""


def _run(tasks: Mapping[tuple[str, int], Task], jobs: int) -> Generator[tuple[tuple[str, int], Measured], None, None]:
    """Runs ``jobs`` cells at a time, and yields each as it ends. One at a time runs in this very process.

    Where one of them fails, those under way are still yielded, and no other begins. Where this process is stopped, they
    end at once.
    """
    if jobs == 1:
        yield from ((cell, train(*task)) for cell, task in tasks.items())
    elif tasks and jobs:
        # fresh interpreters: a process that has run several threads must not be forked
        context = multiprocessing.get_context("spawn")
        others = multiprocessing.active_children()
        begun = os.getpid(), plugins.in_use(), context.Value("i", 0)
        with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=begun) as pool:
            queued, running = iter(tasks.items()), dict[Future[Measured], tuple[str, int]]()
            failure: BaseException | None = None
            try:
                while True:
                    if failure is None:
                        # the pool is given no more than it runs: it would begin what it has queued after a failure
                        with _interrupts_ignored():
                            for cell, task in islice(queued, jobs - len(running)):
                                running[pool.submit(train, *task)] = cell
                    if not running:
                        break
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        cell = running.pop(future)
                        if error := future.exception():
                            failure = failure or error
                        else:
                            yield cell, future.result()
                if failure:
                    raise failure
            except BaseException as error:
                if not isinstance(error, Exception):
                    for worker in set(multiprocessing.active_children()) - set(others):
                        worker.terminate()
                raise


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that begin in it ignore Ctrl-C, which a terminal sends to all: the one that began them ends them."""
    if threading.current_thread() is not threading.main_thread():  # no other may choose what a signal does
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(parent: int, used: Sequence[str], workers: Any) -> None:
    """Makes this process ready for tasks: with plugins and a GPU, and to end with its parent.

    ``workers``: a shared integer, of how many have begun before.
    """
    _end_with(parent)
    with workers.get_lock():
        take_gpu(workers.value)
        workers.value += 1
    for plugin in used:
        plugins.use(plugin)


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent: one that trained on would hold its run when the table is resumed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _folder(of: Kind, root: Path, cell: tuple[str, int]) -> Path:
    return root / (of.runs or of.name) / str(cell[1])


def train(root: Path, experiment: Experiment, figures: Measure, accept_phi_risk: Accepted = False) -> Measured:
    """Runs or resumes one cell, and measures it."""
    folder = RunFolder.open(root, experiment)
    simulate(experiment, folder, accept_phi_risk=accept_phi_risk)
    return measure(folder.path, figures)


def measure(path: Path, figures: Measure) -> Measured:
    """The figures of a finished run."""
    began = time.perf_counter()
    measured = figures(RunFolder(path))
    return path, measured, time.perf_counter() - began


def finished(root: Path, experiment: Experiment, records: KnownRecords | None = None) -> RunFolder | None:
    """The finished run of this very configuration, with the same plugins, if there is one.

    ``records``: as in ``CellResults.load``. A run that noted no fingerprint of its records counts, as it may go on.
    """
    wanted = experiment.pinned()  # a run's own configuration has the checksum of what it starts from
    for path in sorted((root / experiment.name).glob("[0-9]*")):
        folder = RunFolder(path)
        if not (folder.model.exists() and folder.is_of(wanted)):
            continue
        if records is None or is_drawn(wanted) or noted_cohort(folder) in (None, records.of(wanted)):
            return folder
    return None
