"""Runs an experiment on this machine, without FLARE."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any

import numpy as np

from fedvlp.core.checkpoint import save_json, save_text
from fedvlp.core.json_file import read_json
from fedvlp.data.deid import Accepted
from fedvlp.data.partition import write_assignment
from fedvlp.data.record_ids import as_written
from fedvlp.data.report_imputation import provenance
from fedvlp.data.screening import rows_used
from fedvlp.federation.exchange import SequentialExchange, WorkerPool
from fedvlp.federation.loop import Federation
from fedvlp.federation.wire import EncodedSite, SiteEnd, site_memory
from fedvlp.run import finding_heads
from fedvlp.run.assembly import Assembly
from fedvlp.run.cautions import FILE, cautions
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.lock import only_writer
from fedvlp.run.metrics import Record, TensorBoard
from fedvlp.run.status_writer import Progress, RunStatus, phases_left

log = logging.getLogger(__name__)

PARTITION = "partition.json"


class OtherDataError(ValueError):
    """The records of a run are not those that it began with."""


def refuse_other_data(assembly: Assembly, folder: RunFolder) -> None:
    """Raises OtherDataError where the run began with other records, or with other pixels, reports or labels of them.

    A run of a version that did not note the fingerprint is not checked.
    """
    cohort = assembly.cohort
    if noted_cohort(folder) in (None, cohort.fingerprint):
        return
    raise OtherDataError(
        f"the data have changed since this run began: {len(noted_partition(folder)['ids'])} records then, "
        f"{len(cohort)} now, and their fingerprints differ. Put the files, and what decodes them, back as they were, "
        "or begin a new run"
    )


def noted_cohort(folder: RunFolder) -> str | None:
    """The fingerprint of the records that a run began with; None where it noted none."""
    fingerprint: str | None = noted_partition(folder).get("settings", {}).get("cohort")
    return fingerprint


def noted_partition(folder: RunFolder) -> dict[str, Any]:
    """Which record went to which site, as ``_note_partition`` wrote it; empty where the run was not simulated here."""
    file = folder.path / PARTITION
    return dict(read_json(file)) if file.exists() else {}


def _note_partition(assembly: Assembly, folder: RunFolder) -> None:
    """Writes which record went to which site, with the seed, the fingerprint of the records and a hash."""
    cohort = assembly.cohort
    sites = sorted(set(cohort.sites or ()))  # and the public set
    index_of = {site: index for index, site in enumerate(sites)}
    owner = np.asarray([index_of[site] for site in cohort.sites or ()])
    seed = assembly.experiment.rounds.seed
    folder.path.mkdir(parents=True, exist_ok=True)
    shown = as_written(cohort)
    ids = [shown[name] for name in cohort.ids]
    noted = {"sites": ",".join(sites), "cohort": cohort.fingerprint}
    write_assignment(folder.path / PARTITION, owner, ids, seed, **noted)
    if cohort.report_from is not None:
        copied = [(shown[record], shown[source], match) for record, source, match in provenance(cohort)]
        rows = [("record", "report_of", "match"), *copied]
        save_text(folder.path / "retrieved_reports.csv", "".join(f"{','.join(row)}\n" for row in rows))


def simulate(
    experiment: Experiment,
    folder: RunFolder,
    *,
    workers: int = 1,
    accept_phi_risk: Accepted = False,
    report: Callable[[Record], None] = lambda record: None,
    caution: Callable[[str], None] = log.warning,
    say: Callable[[str], None] = log.info,
    watch: Callable[[Progress], AbstractContextManager[Any]] = nullcontext,
) -> list[Record]:
    """Runs ``experiment`` here, resuming where ``folder`` stopped; ``workers`` > 1 trains sites side by side.

    ``report`` gets the record of every complete phase, ``say`` how many rows of the data set are used, and ``caution``,
    before anything is trained, what to know of this run (run/cautions.py). ``watch`` may show the progress. Same bytes
    for any number of workers. Returns the history; the model is in ``folder.model``. Raises PHIError, DeviceError,
    OtherDataError for a run that began with other records, FolderInUseError when another process writes ``folder``.
    """
    import torch

    with only_writer(folder.path):
        # 1. The records, searched for identifiers, and what to know of them before anything is trained.
        experiment.training.torch_device()  # a device that is not here, said once and not by every site
        assembly = Assembly(experiment, folder.path, accept_phi_risk)
        sites = _admit_records(assembly, folder, say, caution)

        # 2. The sites, then the server as the last complete phase left it.
        curves = TensorBoard(folder.path / "tb")
        torch.set_num_threads(1)  # a process that has run several threads must not be forked
        assembly.modules()  # before the fork, so that workers need not build them
        progress = Progress(experiment.method, sites)
        exchange = _exchange(assembly, folder, progress, workers)
        server, next_phase = assembly.open(folder, sites)

        # 3. What is noted of every complete phase.
        progress.total = phases_left(experiment.method, experiment.rounds, server.round, next_phase)
        status = RunStatus(folder.status_file)
        status.begin(experiment.method, experiment.rounds, server, next_phase)
        folder.note_all(server.history)

        readers = (folder.note, status.add, curves, report)

        # 4. The rounds, then the trained model.
        with status.until_the_end():
            with _closing_all(exchange, curves), watch(progress):
                federation = Federation(
                    experiment.method,
                    server,
                    experiment.rounds,
                    status.watched(progress.watched(exchange)),
                    wire=experiment.wire,
                    checkpoint=folder.checkpoint,
                    report=lambda record: _tell(record, readers),
                    present=sites,
                )
                state = federation.run(next_phase)
            heads = finding_heads.solved(experiment, server)
            heads = heads and finding_heads.on_validation(heads, assembly, state)
            folder.finish(experiment, state, server.history, assembly.cohort.label_names, heads)
        return server.history


def _admit_records(
    assembly: Assembly, folder: RunFolder, say: Callable[[str], None], caution: Callable[[str], None]
) -> tuple[str, ...]:
    """The sites whose records train, once these were searched for identifiers and are those that the run began with.

    Notes which site has which record, and tells what to know of them.
    """
    assembly.gate()
    if counted := rows_used(assembly.summary):
        say(f"data: {counted}")
    sites = assembly.sites()
    refuse_other_data(assembly, folder)
    _note_partition(assembly, folder)
    _tell_cautions(assembly, folder, caution)
    return sites


def _tell(record: Record, readers: Iterable[Callable[[Record], None]]) -> None:
    for reader in readers:
        reader(record)


@contextmanager
def _closing_all(*used: Any) -> Iterator[None]:
    """Closes all at the end, however it comes, the last first."""
    with ExitStack() as opened:
        for one in used:
            opened.enter_context(closing(one))
        yield


def _tell_cautions(assembly: Assembly, folder: RunFolder, caution: Callable[[str], None]) -> None:
    """Keeps what to know of this run for its report, and tells it."""
    if sentences := cautions(assembly.experiment, assembly.cohort, assembly.untrained()):
        save_json(folder.path / FILE, sentences)
        for sentence in sentences:
            caution(sentence)


def _exchange(
    assembly: Assembly, folder: RunFolder, progress: Progress, workers: int
) -> SequentialExchange | WorkerPool:
    """The sites, ``workers`` of them at a time, each behind the same encoding as over a network."""
    import torch

    experiment, sites = assembly.experiment, assembly.sites()

    def site(name: str) -> EncodedSite:
        torch.set_num_threads(experiment.training.threads)
        end = SiteEnd(experiment.wire, experiment.method, site_memory(folder.path / "sites" / name))
        trained = assembly.site(name)
        trained.note_processor = True
        trained.client.counted = progress.stepped(name)
        return EncodedSite(trained, end)

    return WorkerPool(site, sites, workers, folder.path / "spool") if workers > 1 else SequentialExchange(site)
