"""The folder of a run (config, versions, metrics, checkpoints, model) and running an experiment on this machine."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import platform
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from fedvlp.config import fingerprint, from_config, to_config
from fedvlp.core.checkpoint import save_json, save_tensors, save_text
from fedvlp.core.client import OBJECTIVE
from fedvlp.core.engine import ForkedWorkers, InTurn
from fedvlp.core.link import EncodedSite, SiteEnd, site_memory
from fedvlp.core.server import Federation, Server
from fedvlp.core.site import EVALUATE
from fedvlp.core.types import State
from fedvlp.data.partition import write_assignment
from fedvlp.data.retrieved import provenance
from fedvlp.evaluation.retrieval import across_sites
from fedvlp.experiment import POOLED, Assembly, Experiment

Record = dict[str, Any]
"""What the server notes of one phase (core/server.py)."""

PACKAGES = ("fedvlp", "torch", "numpy", "safetensors", "nvflare", "monai", "timm", "transformers")
SERVER = "server"


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps everything; never inside FLARE's own workspace, which is emptied at every start."""

    path: Path

    @staticmethod
    def create(root: Path, experiment: Experiment) -> RunFolder:
        """A new folder ``<root>/<name>/<number>`` with the resolved configuration in it."""
        numbers = [int(entry.name) for entry in (root / experiment.name).glob("[0-9]*") if entry.name.isdigit()]
        folder = RunFolder(root / experiment.name / f"{max(numbers, default=0) + 1:03d}")
        save_json(folder.path / "config.json", to_config(experiment))
        save_json(folder.path / "environment.json", environment(experiment))
        return folder

    @staticmethod
    def latest(root: Path, experiment: Experiment) -> RunFolder | None:
        """The newest run of this very configuration that has not finished, or None."""
        entries = [entry for entry in (root / experiment.name).glob("[0-9]*") if entry.name.isdigit()]
        for entry in sorted(entries, key=lambda entry: int(entry.name), reverse=True):
            folder = RunFolder(entry)
            with contextlib.suppress(ValueError):  # a run of another version, or without a readable configuration
                if fingerprint(folder.experiment()) == fingerprint(experiment):
                    return None if folder.model.exists() else folder
        return None

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoints" / "server.safetensors"

    @property
    def model(self) -> Path:
        """The trained weights: there when the run has finished."""
        return self.path / "model" / "model.safetensors"

    def experiment(self) -> Experiment:
        """The configuration that this run was started with."""
        if not self.config.exists():
            raise ValueError(f"{self.path} holds no run: config.json is missing there")
        experiment: Experiment = from_config(json.loads(self.config.read_text(encoding="utf-8")))
        return experiment

    def history(self) -> list[Record]:
        """The records of the phases that are complete."""
        if not self.checkpoint.exists():
            return []
        return Server.load(self.checkpoint)[0].history

    def note(self, history: list[Record]) -> None:
        """Rewrites metrics.csv (round, phase, site, metric, value) from the records."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["round", "phase", "site", "metric", "value"])
        for record in history:
            for site, values in scalars(record).items():
                table.writerows([record["round"], record["phase"], site, tag, value] for tag, value in values.items())
        save_text(self.path / "metrics.csv", text.getvalue())

    def finish(self, experiment: Experiment, state: State, history: list[Record]) -> None:
        """Writes the trained model so that ``DualEncoder.from_pretrained`` reads it, and the summary."""
        model = experiment.model.build(experiment.rounds.seed)
        model.load_state_dict({n: t for n, t in state.items() if not n.startswith(OBJECTIVE)})
        rest = {n: t for n, t in state.items() if n.startswith(OBJECTIVE)}
        if rest:
            save_tensors(self.path / "model" / "objective.safetensors", rest)
        save_json(self.path / "summary.json", summary(history))
        model.save(self.path / "model")


def environment(experiment: Experiment) -> dict[str, Any]:
    """Versions, seed and fingerprint, for whoever wants to repeat the run."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "seed": experiment.rounds.seed, "fingerprint": fingerprint(experiment),
        "python": platform.python_version(), "packages": versions,
    }  # fmt: skip


def by_site(record: Record) -> dict[str, dict[str, float]]:
    """The metrics of a record by the site whose records they measure ("site-1:val/mean/r1" of a pooled run too)."""
    sites: dict[str, dict[str, float]] = {}
    for reporter, metrics in record["sites"].items():
        for name, value in metrics.items():
            about, _, metric = name.rpartition(":") if reporter == POOLED else ("", "", name)
            sites.setdefault(about or reporter, {})[metric] = value
    return sites


def is_retrieval(name: str) -> bool:
    """Whether a metric is a recall (percent, higher is better)."""
    return re.search(r"/r\d+$", name) is not None


def overall(record: Record) -> dict[str, float]:
    """Average, worst site and disparity over sites of every recall that all reporting sites have."""
    measured = {site: {n: v for n, v in m.items() if is_retrieval(n)} for site, m in by_site(record).items()}
    measured = {site: values for site, values in measured.items() if values}
    if not measured:
        return {}
    common = set.intersection(*(set(values) for values in measured.values()))
    return across_sites({site: {n: values[n] for n in sorted(common)} for site, values in measured.items()})


def scalars(record: Record) -> dict[str, dict[str, float]]:
    """Everything worth a curve, by site; the server's own under ``server``."""
    own: dict[str, float] = {"seconds": record["seconds"], **record.get("bytes", {}), **overall(record)}
    own |= record.get("server", {})
    sites = by_site(record)
    names = record["members"]
    for tensor, values in record["memory"].items():
        own |= {f"{tensor}/{site}": v for site, v in zip(names, values, strict=True) if math.isfinite(v)}
    return {SERVER: own, **sites}


def summary(history: list[Record]) -> dict[str, dict[str, float]]:
    """Held-out retrieval of the initial and of the trained model: over sites, and ``server/...`` on the public set."""
    measured = [figures for record in history if (figures := overall(record) | on_public_set(record))]
    return {"initial": measured[0], "trained": measured[-1]} if measured else {}


def on_public_set(record: Record) -> dict[str, float]:
    """Every recall and AUC of the server's model on the public set, as ``server/<name>``."""
    figures = record.get("server", {})
    return {f"{SERVER}/{name}": v for name, v in figures.items() if is_retrieval(name) or "/auc/" in name}


class TensorBoard:
    """Writes records as TensorBoard events, one folder per site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, Any] = {}

    def __call__(self, record: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for site, values in scalars(record).items():
            if site not in self._writers:
                self._writers[site] = SummaryWriter(str(self.folder / site))
            for tag, value in values.items():
                self._writers[site].add_scalar(f"{tag}{suffix(record, tag)}", value, record["round"])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def suffix(record: Record, tag: str) -> str:
    """Distinguishes the phases of a round where both have the curve."""
    per_phase = tag.startswith(("loss/", "update_norm/")) or tag in ("seconds", "bytes_down", "bytes_up")
    return f"/{record['phase']}" if per_phase and record["phase"] != EVALUATE else ""


def _note_partition(assembly: Assembly, folder: RunFolder) -> None:
    """Writes which record went to which site, with the seed and a hash."""
    cohort = assembly.cohort
    sites = sorted(set(cohort.sites or ()))  # and the public set
    place = {site: index for index, site in enumerate(sites)}
    owner = np.asarray([place[site] for site in cohort.sites or ()])
    seed = assembly.experiment.rounds.seed
    folder.path.mkdir(parents=True, exist_ok=True)
    write_assignment(folder.path / "partition.json", owner, cohort.ids, seed, sites=",".join(sites))
    if cohort.report_from is not None:
        rows = [("record", "report_of", "match"), *provenance(cohort)]
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

    Same bytes for any number of workers. Returns the history; the model is in ``folder.model``. Raises PHIError.
    """
    import torch

    assembly = Assembly(experiment, folder.path, accept_phi_risk)
    assembly.gate()
    sites = assembly.sites()

    def site(name: str) -> EncodedSite:
        torch.set_num_threads(experiment.training.threads)
        end = SiteEnd(experiment.wire, experiment.method.phases, site_memory(folder.path / "sites" / name))
        return EncodedSite(assembly.site(name), end)

    _note_partition(assembly, folder)
    torch.set_num_threads(1)  # a process that has run several threads must not be forked
    assembly.modules()  # before the fork, so that workers need not build them
    exchange = ForkedWorkers(site, sites, workers, folder.path / "spool") if workers > 1 else InTurn(site)
    if folder.checkpoint.exists():
        server, next_phase = Server.load(folder.checkpoint)
        assembly.equip(server)
    else:
        server, next_phase = assembly.server(sites), 0
    with closing(exchange), closing(TensorBoard(folder.path / "tb")) as board:

        def noted(record: Record) -> None:
            folder.note(server.history)
            board(record)
            report(record)

        federation = Federation(
            experiment.method, server, experiment.rounds, exchange,
            wire=experiment.wire, checkpoint=folder.checkpoint, report=noted,
        )  # fmt: skip
        state = federation.run(next_phase)
    folder.note(server.history)
    folder.finish(experiment, state, server.history)
    return server.history
