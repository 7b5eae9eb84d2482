"""What an experiment takes over from its data set: the channels of images, and CreamFL's sites and classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from fedvlp.core.types import MODALITIES
from fedvlp.data.cohort import PUBLIC
from fedvlp.data.screening import DataSource
from fedvlp.data.sources.table import TableSource
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.initial import SHIPPED, parse
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.site_sources import SiteSources


def fitted(experiment: Experiment) -> Experiment:
    """The experiment for its data set: towers take colour where that is in colour, and see ``of_modalities``."""
    sources = sources_of(experiment.data)
    if any(DataSource.of(source).in_colour for source in sources.values()):
        models = tuple((site, _in_colour(model)) for site, model in experiment.site_models)
        experiment = replace(experiment, model=_in_colour(experiment.model), site_models=models)
    if not isinstance(experiment.objective, CreamFLTaskConfig):
        return experiment
    if isinstance(experiment.data, TableSource) and experiment.data.names_sites():
        return of_modalities(experiment, sources, experiment.data.modalities_by_site())
    if "" in sources:
        return experiment
    return of_modalities(experiment, sources, {name: held_by(source) for name, source in sources.items()})


def held_by(source: Any) -> tuple[str, ...]:
    """Which of image and text the records of a data set have: a table's own by what its cells say."""
    if not isinstance(source, TableSource):
        return DataSource.of(source).modalities
    of_sites = source.modalities_by_site().values()
    return tuple(name for name in MODALITIES if any(name in held for held in of_sites))


def sources_of(data: Any) -> dict[str, Any]:
    """Site -> its data set, where the data set has one for each ("public" is one of them); else "" -> ``data``."""
    if isinstance(data, SiteSources):
        return dict(data.sites)
    return DataSource.of(data).by_site() or {"": data}


def _in_colour(model: ModelConfig) -> ModelConfig:
    """The model with an image tower of three channels, unless their number was chosen."""
    return model if model.in_channels else replace(model, in_channels=3)


def of_modalities(
    experiment: Experiment, sources: Mapping[str, Any], held: Mapping[str, tuple[str, ...]]
) -> Experiment:
    """An experiment of CreamFL's family on these data sets of its sites, of which each has ``held`` of image and text.

    Sites lack what their data sets lack and nothing else, and have the model that the preset gives to such a site. The
    public set is the site "public", if there is one. Classes are those of the sites' data sets, each in its own space.
    """
    sites = {name: modalities for name, modalities in held.items() if name != PUBLIC}
    share = 0.0 if PUBLIC in held else experiment.partition.public
    split = replace(experiment.partition, sites=len(sites), image_only=0, text_only=0, public=share)
    models = _models_by_modality(experiment)
    given = tuple((name, models[modalities]) for name, modalities in sites.items()) if models else ()
    experiment = replace(experiment, partition=split, site_models=given)
    classes = {name for source in sources.values() for name in DataSource.of(source).class_names()}
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


def _models_by_modality(experiment: Experiment) -> dict[tuple[str, ...], ModelConfig]:
    """Modalities -> the model of the preset's sites that have these; empty where all have the server's."""
    models, split = [model for _, model in experiment.site_models], experiment.partition
    if not models:
        return {}
    image_first = len(models) - split.image_only - split.text_only  # order: paired, image-only, text-only
    of_images = models[min(max(0, image_first), len(models) - 1)]
    return {MODALITIES: models[0], ("image",): of_images, ("text",): models[-1]}


# The paths that an experiment names, made absolute: a run can then be gone on with and read from any folder.
#
# An experiment that leaves for other machines, in a job, keeps what was typed: it names weights and towers there by the
# names of their folders, and no path of this machine is theirs to know.

OF_EVERY_SOURCE = ("root", "cache")
"""Settings of a data set that are folders; those that are files are declared below the root (data/sources/table.py)."""


def absolute(experiment: Experiment) -> Experiment:
    """The same experiment, with the paths of its data and of the weights to start from as they are from here."""
    models = tuple((site, _from_here(model)) for site, model in experiment.site_models)
    data = with_paths(experiment.data, lambda path: str(Path(path).absolute()))
    return replace(experiment, data=data, model=_from_here(experiment.model), site_models=models)


def is_path(value: Any, setting: str) -> bool:
    """Whether the ``setting`` of a data set (or of a model) is one that names a file or a folder."""
    field = next((field for field in fields(value) if field.name == setting), None)
    return field is not None and (setting in OF_EVERY_SOURCE or bool(field.metadata.get("below_root")))


def with_paths(source: Any, change: Callable[[str], str]) -> Any:
    """A data set with each of its paths as ``change`` makes it, and so those that it is made of, also in lists."""
    if isinstance(source, (list, tuple)):
        return tuple(with_paths(item, change) for item in source)
    if not is_dataclass(source) or isinstance(source, type):
        return source
    changed: dict[str, Any] = {}
    for field in fields(source):
        value = getattr(source, field.name)
        if is_path(source, field.name) and isinstance(value, str) and value:
            changed[field.name] = change(value)
        elif is_dataclass(value) or (isinstance(value, (list, tuple)) and any(map(_may_hold, value))):
            changed[field.name] = with_paths(value, change)
    return replace(source, **changed) if changed else source


def _may_hold(item: Any) -> bool:
    """Whether an item of a list may be a data set, or have one in it; most lists hold names and numbers."""
    return is_dataclass(item) or isinstance(item, (list, tuple))


def _from_here(model: Any) -> Any:
    """The model with the absolute path of the folder that it starts from, where that is a folder here."""
    init = parse(model.init)
    if init.name in SHIPPED or not init.name or not Path(init.name).exists():
        return model
    return replace(model, init=str(init._replace(name=str(Path(init.name).absolute()))))
