"""Run the cells of a table, a run folder each: reuse finished runs, resume interrupted ones."""

from __future__ import annotations

import json
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
from typing import Any

from fedvlp.core.validate import require
from fedvlp.data.deid import Accepted
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.latent import LatentCohort
from fedvlp.run import plugins
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder, code
from fedvlp.run.simulate import noted_cohort, simulate
from fedvlp.training.settings import take_gpu

DONE, HERE, OTHER_CODE = "done", "there already", "there already, run by a fedvlp with other code"
"""What became of a cell: it was run now, or its run had finished."""

Said = Callable[[str, int, str], None]
"""Called with method, seed and one of these."""

Cell = tuple[str, int]
"""Method and seed."""

Cells = dict[Cell, Experiment]

Figures = dict[str, float]
"""Name -> figure of one finished run."""

Measure = Callable[[RunFolder], Figures]
"""Measures a finished run."""


class KnownRecords:
    """The fingerprints of the records on which cells train; cells with the same records have them read once."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, experiment: Experiment) -> str | None:
        """The fingerprint of the records now; None of a synthetic cohort, which its configuration determines.

        Raises ValueError where they cannot be read.
        """
        if is_drawn(experiment):
            return None
        decides = experiment.data, experiment.partition, experiment.rounds.seed
        key = json.dumps(to_config(decides), sort_keys=True)
        if key not in self._known:
            self._known[key] = Assembly(experiment).cohort.fingerprint
        return self._known[key]


def is_drawn(experiment: Experiment) -> bool:
    """Whether its configuration alone determines its records: they are drawn, and not read from a disk."""
    return isinstance(experiment.data, SyntheticCohort | LatentCohort)


class Results:
    """Where figures outlast their runs: nowhere, unless a derived class keeps them."""

    def load(self, cell: Cell, experiment: Experiment, measure: Measure, records: KnownRecords) -> Figures | None:
        """The figures of a cell, if they are kept and of this very experiment."""
        return None

    def save(self, cell: Cell, run: RunFolder, figures: Figures, measure: Measure, seconds: float) -> Figures:
        """Keeps the figures of a cell, which took ``seconds`` to measure. Returns them as they are kept."""
        return figures


FILED = "in the results"
"""What became of a cell whose figures a :class:`Results` kept."""


def measured(
    figures: Measure,
    cells: Cells,
    root: Path,
    jobs: int,
    said: Said,
    accept_phi_risk: Accepted = False,
    results: Results | None = None,
) -> dict[Cell, Figures]:
    """The figures of the cells: kept in ``results``, of finished runs, or of runs that begin now.

    ``jobs`` cells run at a time; stopped and started again, it continues. With ``jobs`` 0 nothing is run, and the cells
    that have not finished are left out. ``accept_phi_risk`` is that of ``run.simulate``. The runs are in
    ``<root>/<seed>/<method>/``. Raises what a run raises: no other begins then, and those under way end and are saved
    first.
    """
    require(jobs >= 0, f"--jobs is {jobs}; give how many runs at a time, or 0 to run nothing")
    table: dict[Cell, Figures] = {}
    wanted: Cells = {}
    records, results = KnownRecords(), results or Results()

    def noted(cell: Cell, one: Measured) -> None:
        path, measures, seconds = one
        table[cell] = results.save(cell, RunFolder(path), measures, figures, seconds)

    # 1. What is there already.
    for cell, experiment in cells.items():
        stored = results.load(cell, experiment, figures, records)
        run = None if stored else finished(root / str(cell[1]), experiment, records)
        if stored:
            table[cell] = stored
            said(*cell, FILED)
        elif run:
            noted(cell, measure(run.path, figures))
            said(*cell, HERE if run.code in ("", code()) else OTHER_CODE)
        else:
            wanted[cell] = experiment

    # 2. What is not is run.
    tasks = {cell: (root / str(cell[1]), one, figures, accept_phi_risk) for cell, one in wanted.items()}
    with closing(_run(tasks, jobs)) as ended:
        for cell, one in ended:
            noted(cell, one)
            said(*cell, DONE)
    return {cell: table[cell] for cell in cells if cell in table}


Measured = tuple[Path, Figures, float]
"""Folder of a finished run, its figures, and the seconds that measuring them took."""

Task = tuple[Path, Experiment, Measure, Accepted]
"""Arguments of ``train``."""


def _run(tasks: Mapping[Cell, Task], jobs: int) -> Generator[tuple[Cell, Measured], None, None]:
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
            queued, running = iter(tasks.items()), dict[Future[Measured], Cell]()
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

    ``records``: those of now, with which a run's are compared where they are read from a disk. A run that noted no
    fingerprint of its records counts, as it may be resumed.
    """
    wanted = experiment.pinned()  # a run's own configuration has the checksum of what it starts from
    for path in sorted((root / experiment.name).glob("[0-9]*")):
        folder = RunFolder(path)
        if not (folder.model.exists() and folder.is_of(wanted)):
            continue
        if records is None or is_drawn(wanted) or noted_cohort(folder) in (None, records.of(wanted)):
            return folder
    return None
