"""The folder of a run: configuration, versions, metrics, checkpoints and the trained model."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedvlp.core.checkpoint import save_json, save_tensors, save_text
from fedvlp.core.client import OBJECTIVE
from fedvlp.core.server_state import Server
from fedvlp.core.types import State
from fedvlp.run.config import fingerprint, from_config, to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.metrics import Record, scalars, summary

PACKAGES = ("fedvlp", "torch", "numpy", "safetensors", "nvflare", "monai", "timm", "transformers")


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps everything; never inside FLARE's own workspace, which is emptied at every start."""

    path: Path

    @staticmethod
    def create(root: Path, experiment: Experiment) -> RunFolder:
        """A new folder ``<root>/<name>/<number>`` with the resolved configuration in it.

        Raises ValueError where a link leads the folder out of ``root``.
        """
        runs = root / experiment.name
        if not runs.resolve().is_relative_to(root.resolve()):
            raise ValueError(f"the runs of {experiment.name} lie outside of the folder of runs; remove the link there")
        runs.mkdir(parents=True, exist_ok=True)
        number = max((int(entry.name) for entry in runs.glob("[0-9]*") if entry.name.isdigit()), default=0) + 1
        while True:
            folder = RunFolder(runs / f"{number:03d}")
            try:
                folder.path.mkdir()
                break
            except FileExistsError:  # another process has just taken the number
                number += 1
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
