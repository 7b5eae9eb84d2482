"""The paths that an experiment names, made absolute: a run can then be gone on with and read from any folder.

An experiment that leaves for other machines, in a job, keeps what was typed: it names weights and towers there by the
names of their folders, and no path of this machine is theirs to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from fedvlp.models.initial import SHIPPED, parse
from fedvlp.run.experiment import Experiment

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
