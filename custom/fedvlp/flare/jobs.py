"""Job folders: written from the presets as plain JSON, so that what is committed is exactly what runs.

FLARE's own exporter drops arguments that it cannot find as attributes, copies fragments of installed packages and
writes ``"*"`` filters that never apply; a job folder is three small files, so fedvlp writes them itself.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import fedvlp
from fedvlp.config import to_config
from fedvlp.core.checkpoint import save_text
from fedvlp.core.site import EVALUATE
from fedvlp.experiment import Assembly, Experiment

COMMITTED = ("fedavg", "fedprox", "local", "feddra", "fedrgb")
"""The presets whose job folders are committed under jobs/."""

NOTE = """This folder marks the job as one that brings its own code (FLARE: BYOC), which lets the simulator and a POC
load fedvlp's classes. Hospitals switch BYOC off, install fedvlp, list "fedvlp." in their class allow-list and take a
job without this folder: `fedvlp jobs export NAME OUT --installed`.
"""


def job_files(experiment: Experiment, *, custom: bool = True) -> dict[str, str]:
    """The files of a job folder, by path. Committed jobs name their sites: with ``@ALL`` the simulator runs two."""
    sites = Assembly(experiment).sites()
    parts = {f.name: to_config(getattr(experiment, f.name)) for f in fields(experiment)}
    phases = sorted({p for r in range(experiment.rounds.rounds) for p in experiment.method.phases(r)} | {EVALUATE})
    meta = {
        "name": experiment.name, "resource_spec": {}, "min_clients": experiment.rounds.needed(len(sites)),
        "deploy_map": {"app": ["server", *sites]},
    }  # fmt: skip
    server = {
        "format_version": 2,
        "server": {"task_request_interval": 0.1},
        "workflows": [{"id": "federation", "path": "fedvlp.flare.controller.FederatedController", "args": parts}],
        "components": [
            {"id": "tensorboard", "path": "fedvlp.flare.tracking.TensorBoardReceiver", "args": {}},
            {
                "id": "metrics",
                "path": "nvflare.app_common.widgets.metrics_artifact_writer.MetricsArtifactWriter",
                "args": {},
            },
        ],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": phases, "executor": {"path": "fedvlp.flare.executor.SiteExecutor", "args": parts}}],
        "components": [
            {
                "id": "to_server",
                "path": "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",
                "args": {"events_to_convert": ["analytix_log_stats"]},
            }
        ],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    files: dict[str, Any] = {
        "meta.json": meta,
        "app/config/config_fed_server.json": server,
        "app/config/config_fed_client.json": client,
    }
    texts = {path: json.dumps(content, indent=2) + "\n" for path, content in files.items()}
    return texts | ({"app/custom/README.md": NOTE} if custom else {})


def write_job(experiment: Experiment, folder: Path, *, custom: bool = True, bundled: bool = False) -> Path:
    """Writes the job into ``folder`` (replaced); ``bundled`` puts the package itself into ``app/custom``.

    Raises FileExistsError when ``folder`` holds something that is not a job.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "meta.json").exists():
        raise FileExistsError(f"{folder} is not empty and holds no FLARE job (no meta.json); choose another folder")
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in job_files(experiment, custom=custom or bundled).items():
        save_text(folder / path, text)
    if bundled:
        package = Path(fedvlp.__file__).parent
        target = folder / "app" / "custom" / "fedvlp"
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
