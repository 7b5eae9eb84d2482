"""A FLARE Recipe for Python users: a preset, with overrides, to run in SimEnv, PocEnv or ProdEnv or to export.

from nvflare.recipe import SimEnv
from fedvlp.flare.recipe import FedVLPRecipe

FedVLPRecipe("feddra", {"method.rho": 0.5}).execute(SimEnv(num_clients=5))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import ALL_SITES
from nvflare.job_config.api import FedJob
from nvflare.job_config.fed_job_config import FedJobConfig
from nvflare.recipe.spec import ExecEnv, Recipe

from fedvlp.flare.jobs import write_job
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment


class _PresetConfig(FedJobConfig):
    """Writes the job folder as ``fedvlp jobs export`` does; FLARE's own exporter would drop arguments."""

    experiment: Experiment

    def generate_job_config(self, job_root: str) -> None:
        write_job(self.experiment, Path(job_root) / self.job_name)


class PresetJob(FedJob):
    """A FedJob whose folder comes from an experiment."""

    clients: list[str]

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(name=experiment.name)
        self.job = _PresetConfig(job_name=experiment.name, min_clients=1)
        self.job.experiment = experiment

    def _set_all_apps(self) -> None:
        self.clients = self.clients or [ALL_SITES]


class FedVLPRecipe(Recipe):
    """``preset`` by name, ``settings`` as ``--set`` takes them. Raises ValueError for an unknown one.

    What FLARE would add to a recipe's job (filters, files) is not supported: a site's filters belong to the site.
    """

    def __init__(self, preset: str, settings: Mapping[str, Any] | None = None) -> None:
        experiment = presets.get(preset)
        for key, value in (settings or {}).items():
            experiment = override(experiment, key, value if isinstance(value, str) else json.dumps(value))
        self.experiment = experiment
        super().__init__(PresetJob(experiment))

    def execute(self, env: ExecEnv, *args: Any, **options: Any) -> Any:
        """As every recipe. Raises ValueError for an environment that has other sites than the job.

        FLARE would run those that it has, and say nothing of the others.
        """
        refuse_other_sites(env, Assembly(self.experiment).sites())
        return super().execute(env, *args, **options)


def refuse_other_sites(env: ExecEnv, sites: Sequence[str]) -> None:
    """Raises ValueError unless the environment has the job's ``sites``; one that names and counts none is taken."""
    count = getattr(env, "num_clients", 0)
    given = getattr(env, "clients", None) or [f"site-{index + 1}" for index in range(count or 0)]
    if given and set(given) != set(sites):
        raise ValueError(
            f"{type(env).__name__} has the sites {', '.join(given)}; the job is for {', '.join(sites)}. Give it "
            f"clients={list(sites)}, or set data.sites or partition.sites to as many as it has"
        )
