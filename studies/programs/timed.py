"""FedAvg that notes when a site's steps begin and end: the workload of ``orchestration.py``, inside FLARE too."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.types import Batch, Broadcast
from fedvlp.methods.fedavg import FedAvg

EVENTS = "FEDVLP_BENCH_EVENTS"
"""Environment variable: the file to which every process of a run appends one line per site visit."""

_visit = {"began": 0.0, "steps": 0}


def note(site: str, began: float, ended: float) -> None:
    """Appends ``site began ended`` (CLOCK_MONOTONIC seconds, the same in every process)."""
    with open(os.environ[EVENTS], "a", encoding="utf-8") as file:
        file.write(f"{site} {began!r} {ended!r}\n")


@dataclass(frozen=True)
class TimedFedAvg(FedAvg):
    """FedAvg; the steps are its own."""

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        if not _visit["steps"]:
            _visit["began"] = time.monotonic()
        _visit["steps"] += 1
        return super().losses(client, batch, message)

    def after_step(self, client: Client, message: Broadcast) -> None:
        if _visit["steps"] == self.local_steps:
            note(client.name, _visit["began"], time.monotonic())
            _visit["steps"] = 0
