"""What an experiment takes over from its data set: the channels of images, and CreamFL's sites and classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedvlp.core.types import MODALITIES
from fedvlp.data.cohort import PUBLIC
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.objectives.creamfl import CreamFLTaskConfig
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.site_sources import SiteSources


def fitted(experiment: Experiment) -> Experiment:
    """The experiment for its data set: towers take colour where that is in colour, and see ``of_modalities``."""
    sources = sources_of(experiment.data)
    if any(getattr(source, "colour", False) for source in sources.values()):
        models = tuple((site, _in_colour(model)) for site, model in experiment.site_models)
        experiment = replace(experiment, model=_in_colour(experiment.model), site_models=models)
    if isinstance(experiment.objective, CreamFLTaskConfig) and "" not in sources:
        return of_modalities(experiment, sources)
    return experiment


def sources_of(data: Any) -> dict[str, Any]:
    """Site -> its data set, where the data set has one for each ("public" is one of them); else "" -> ``data``."""
    if isinstance(data, SiteSources):
        return dict(data.sites)
    return dict(data.by_site()) if hasattr(data, "by_site") else {"": data}


def _in_colour(model: ModelConfig) -> ModelConfig:
    """The model with an image tower of three channels, unless their number was chosen."""
    return model if model.in_channels else replace(model, in_channels=3)


def of_modalities(experiment: Experiment, sources: Mapping[str, Any]) -> Experiment:
    """An experiment of CreamFL's family on these data sets of its sites.

    Sites lack what their data sets lack and nothing else, and have the model that the preset gives to such a site. The
    public set is the site "public", if there is one. Classes are those of the sites' data sets, each in its own space.
    """
    sites = {name: source for name, source in sources.items() if name != PUBLIC}
    share = 0.0 if PUBLIC in sources else experiment.partition.public
    split = replace(experiment.partition, sites=len(sites), image_only=0, text_only=0, public=share)
    models = _models_by_modality(experiment)
    given = tuple((name, models[_modalities(source)]) for name, source in sites.items()) if models else ()
    experiment = replace(experiment, partition=split, site_models=given)
    classes = {name for source in sites.values() if hasattr(source, "classes") for name in source.classes()}
    if not classes:
        return experiment
    objective: Any = experiment.objective
    return replace(experiment, objective=replace(objective, classes=len(classes), label_spaces="own"))


def undealt(partition: Partition) -> Partition:
    """The partition where every site keeps records of its own: none become public, and no site loses a modality."""
    return replace(partition, image_only=0, text_only=0, public=0.0)


def for_sites(experiment: Experiment, sites: Sequence[str]) -> Experiment:
    """The experiment for sites of these names: each has the model that the preset gives to a site with pairs.

    A selector tells as many sites apart as there are.
    """
    models = _models_by_modality(experiment)
    given = tuple((site, models[MODALITIES]) for site in sites) if models else ()
    extra: Any = experiment.extra
    if hasattr(extra, "sites") and sites:
        extra = replace(extra, sites=len(sites))
    return replace(experiment, site_models=given, extra=extra)


def _modalities(source: Any) -> tuple[str, ...]:
    return getattr(source, "modalities", MODALITIES)


def _models_by_modality(experiment: Experiment) -> dict[tuple[str, ...], ModelConfig]:
    """Modalities -> the model of the preset's sites that have these; empty where all have the server's."""
    models, split = [model for _, model in experiment.site_models], experiment.partition
    if not models:
        return {}
    image_first = len(models) - split.image_only - split.text_only  # order: paired, image-only, text-only
    of_images = models[min(max(0, image_first), len(models) - 1)]
    return {MODALITIES: models[0], ("image",): of_images, ("text",): models[-1]}
