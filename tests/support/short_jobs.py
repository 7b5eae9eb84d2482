"""The presets of the committed jobs at three sites, with as little to do as the limits of a provisioned site allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedvlp.run import presets
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment

SHORT: dict[str, Any] = {
    "data.sites": 3, "data.size": 600, "data.beta": 1000.0, "partition.sites": 3, "extra.sites": 3, "rounds.rounds": 1,
    "training.batch_size": 64, "method.local_steps": 1, "method.align_steps": 1, "method.aligner_steps": 1,
    "method.local_epochs": 1, "method.server_steps": 1, "method.distil_steps": 1,
}  # fmt: skip
"""One round with 64 records behind every update; sites of one size."""

FEWER_SITES = {"creamfl": {"partition.image_only": 1}, "car-mfl": {"partition.image_only": 2}}
"""Of three sites one has pairs, and for CreamFL one has images and one has reports."""


def committed(name: str, **settings: Any) -> Experiment:
    """The preset ``name``, shortened; ``settings`` ("model__head_norm") on top of that."""
    experiment = presets.get(name)
    given = {key.replace("__", "."): value for key, value in settings.items()}
    for key, value in {**SHORT, **FEWER_SITES.get(name, {}), **given}.items():
        group, _, field = key.partition(".")
        if hasattr(getattr(experiment, group), field):
            experiment = override(experiment, key, str(value))
    return of_its_sites(experiment)


def of_its_sites(experiment: Experiment) -> Experiment:
    """Without the models of sites that a smaller number of sites has left out."""
    sites = {f"site-{number}" for number in range(1, experiment.partition.sites + 1)}
    return replace(experiment, site_models=tuple(own for own in experiment.site_models if own[0] in sites))
