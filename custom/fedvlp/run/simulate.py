"""Runs an experiment on this machine, without FLARE."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import numpy as np

from fedvlp.core.checkpoint import save_text
from fedvlp.data.partition import write_assignment
from fedvlp.data.record_ids import as_written
from fedvlp.data.report_imputation import provenance
from fedvlp.federation.exchange import SequentialExchange, WorkerPool
from fedvlp.federation.loop import Federation
from fedvlp.federation.wire import EncodedSite, SiteEnd, site_memory
from fedvlp.run.assembly import Assembly
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.lock import only_writer
from fedvlp.run.metrics import Record, TensorBoard


def _note_partition(assembly: Assembly, folder: RunFolder) -> None:
    """Writes which record went to which site, with the seed and a hash."""
    cohort = assembly.cohort
    sites = sorted(set(cohort.sites or ()))  # and the public set
    index_of = {site: index for index, site in enumerate(sites)}
    owner = np.asarray([index_of[site] for site in cohort.sites or ()])
    seed = assembly.experiment.rounds.seed
    folder.path.mkdir(parents=True, exist_ok=True)
    shown = as_written(cohort)
    ids = [shown[name] for name in cohort.ids]
    write_assignment(folder.path / "partition.json", owner, ids, seed, sites=",".join(sites))
    if cohort.report_from is not None:
        copied = [(shown[record], shown[source], match) for record, source, match in provenance(cohort)]
        rows = [("record", "report_of", "match"), *copied]
        save_text(folder.path / "retrieved_reports.csv", "".join(f"{','.join(row)}\n" for row in rows))


def simulate(
    experiment: Experiment,
    folder: RunFolder,
    *,
    workers: int = 1,
    accept_phi_risk: bool = False,
    report: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Runs ``experiment`` here, resuming where ``folder`` stopped; ``workers`` > 1 trains sites side by side.

    Same bytes for any number of workers. Returns the history; the model is in ``folder.model``. Raises PHIError, and
    FolderInUseError when another process writes ``folder``.
    """
    with only_writer(folder.path):
        return _simulate(experiment, folder, workers, accept_phi_risk, report)


def _simulate(
    experiment: Experiment, folder: RunFolder, workers: int, accept_phi_risk: bool, report: Callable[[Record], None]
) -> list[Record]:
    import torch

    assembly = Assembly(experiment, folder.path, accept_phi_risk)
    assembly.gate()
    sites = assembly.sites()

    def site(name: str) -> EncodedSite:
        torch.set_num_threads(experiment.training.threads)
        end = SiteEnd(experiment.wire, experiment.method.phases, site_memory(folder.path / "sites" / name))
        trained = assembly.site(name)
        trained.note_processor = True
        return EncodedSite(trained, end)

    _note_partition(assembly, folder)
    torch.set_num_threads(1)  # a process that has run several threads must not be forked
    assembly.modules()  # before the fork, so that workers need not build them
    exchange = WorkerPool(site, sites, workers, folder.path / "spool") if workers > 1 else SequentialExchange(site)
    server, next_phase = assembly.open(folder, sites)
    folder.note_all(server.history)
    with closing(exchange), closing(TensorBoard(folder.path / "tb")) as board:

        def noted(record: Record) -> None:
            folder.note(record)
            board(record)
            report(record)

        federation = Federation(
            experiment.method, server, experiment.rounds, exchange,
            wire=experiment.wire, checkpoint=folder.checkpoint, report=noted,
        )  # fmt: skip
        state = federation.run(next_phase)
    folder.finish(experiment, state, server.history)
    return server.history
