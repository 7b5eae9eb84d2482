"""What a report reads of a run: whatever its folder has so far."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from fedvlp.core.json_file import read_json
from fedvlp.core.method import Method, sends
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, State
from fedvlp.evaluation import metric_names
from fedvlp.report import figures
from fedvlp.run import audit, beside, recalls, zero_shot_areas
from fedvlp.run.beside import Beside
from fedvlp.run.cautions import FILE as CAUTIONS
from fedvlp.run.compare import BATCH
from fedvlp.run.experiment import POOLED, Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import Record, by_site, impossible, overall

SCOPES = {metric_names.IN_BATCH: f"in batches of {BATCH}", metric_names.WHOLE_SET: "whole set"}
"""Candidates of a recall, in words; those that are told first."""


@dataclass(frozen=True)
class Run:
    """What a report reads of a run; empty where the folder lacks it."""

    folder: RunFolder
    config: dict[str, Any]  # config.json
    environment: dict[str, Any]  # environment.json
    status: dict[str, Any]  # run_status.json
    history: list[Record]
    samples: dict[str, int]  # site -> training records
    memory: State  # the server's
    method: Method | None  # None where the folder has no configuration, or that of a plugin which is not here
    closed_form: bool  # whether no site takes a step, so that the random heads of the initial model take no part
    sends: bool  # whether sites send weights
    saved: str  # time of the last checkpoint, UTC
    statistics: str  # of which records the running statistics of the saved model are
    cautions: list[str]  # sentences of what to know before believing the figures
    recalls: list[recalls.Recall]  # measured again, with intervals; empty where nobody did
    beside: list[Beside]  # what it is held against; empty on the synthetic cohort, and where nobody measured
    areas: list[zero_shot_areas.Area]  # zero-shot, by finding and site; empty where nobody measured them
    audit: audit.Audit | None  # what attacks learn of the records; None where nobody ran them
    films: bool  # whether a person asked for images and reports of the records

    @staticmethod
    def read(folder: RunFolder, films: bool = False) -> Run:
        """Reads what a run's folder has so far. ``films``: a person asks for images and reports of the records.

        Raises CheckpointError for a damaged checkpoint, ValueError for a damaged file of recalls or areas.
        """
        state = folder.server()
        server, saved = state[0] if state else Server((), {}), ""
        if state:
            moment = datetime.fromtimestamp(folder.checkpoint.stat().st_mtime, timezone.utc)
            saved = f"{moment:%Y-%m-%d %H:%M} UTC"
        config, environment, status, cautions, model = (
            read_json(path) if path.exists() else {}
            for path in (
                folder.config,
                folder.path / "environment.json",
                folder.status_file,
                folder.path / CAUTIONS,
                folder.model.parent / "config.json",
            )
        )
        statistics, experiment = model.get("statistics", ""), _experiment(folder)
        method = experiment.method if experiment else None
        return Run(
            folder,
            config,
            environment,
            status,
            server.history,
            server.samples,
            server.memory,
            method,
            experiment is not None and not experiment.takes_steps,
            method is not None and sends(method, server.state),
            saved,
            statistics,
            list(cautions),
            recalls.read(folder),
            beside.rows(folder),
            zero_shot_areas.read(folder),
            audit.read(folder),
            films,
        )

    def setting(self, key: str) -> Any:
        """A setting such as ``rounds.seed``, or None."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get("args", {}).get(name) if isinstance(value, dict) else None
        return value

    @property
    def evaluated(self) -> str:
        """What a site measured where that is not the server's model, e.g. "its own model"; else ""."""
        return self.method.evaluates() if self.method else ""

    @property
    def measurable(self) -> bool:
        """Whether the recalls can be measured again: not where sites have models of their own beside the server's."""
        return self.sends or self.method is None or not self.method.uses_public

    @property
    def left_out(self) -> str:
        """A sentence on the reported figures that are nowhere, since they would spoil every average; "" without any."""
        count = sum(map(impossible, self.history))
        return f"Left out, as no model has such metrics: {count} recalls or AUCs out of their range." if count else ""

    @cached_property
    def measured(self) -> list[tuple[Record, dict[str, float]]]:
        """The records with an evaluation, each with its recalls over sites (``run.metrics.overall``).

        Of a closed form without the one before round 0.
        """
        known = [record for record in self.history if not (self.closed_form and is_initial(record))]
        return [(record, figures) for record in known if (figures := overall(record))]

    @cached_property
    def training(self) -> list[tuple[Record, dict[str, dict[str, float]]]]:
        """The records of training phases, each with site -> name -> figure."""
        return [(record, by_site(record)) for record in self.history if record["phase"] != EVALUATE]

    @cached_property
    def sites(self) -> list[str]:
        """Every site that was asked or measured; site-2 stands before site-10, the pooled site last."""
        names = {name for record in self.history for name in (*record["members"], *by_site(record))}
        return sorted(
            names,
            key=lambda name: (name == POOLED, [p.zfill(9) if p.isdecimal() else p for p in re.split(r"(\d+)", name)]),
        )

    def style(self, site: str) -> dict[str, Any]:
        """matplotlib's settings of a site's line, the same in every figure."""
        chosen = figures.look(self.sites.index(site))
        return {**chosen, "color": "#555555"} if site == POOLED else chosen


def is_initial(record: Record) -> bool:
    """Tell whether a record measured the model before round 0."""
    return bool(record["round"] == 0 and record["phase"] != EVALUATE)


def _experiment(folder: RunFolder) -> Experiment | None:
    try:
        return folder.experiment() if folder.config.exists() else None
    except ValueError:  # of a plugin that is not here: the page shows what it can
        return None
