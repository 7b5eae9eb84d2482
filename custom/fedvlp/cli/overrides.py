"""The settings that every command with an experiment accepts (preset, data, sites, --set), and plugins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedvlp.run.experiment import Experiment, Source

Setting = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, e.g. method.rho=0.1; may be repeated.")
]

DATA = "synthetic (default), label-skew, scanner-shift, table:PATH.csv, SOURCE:PATH"
"""What ``--data`` of every command takes."""

Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", help="A file (my_method.py) or module with methods, objectives, ... of your own; may be repeated."
    ),
]


def use_plugins(named: list[str] | None) -> None:
    """Imports what ``--plugin`` names. Raises PluginError."""
    if named:
        from fedvlp.run import plugins

        for name in named:
            plugins.use(name)


def configured(
    preset: str, data: str | None, sites: int | None, settings: list[str] | None, like: Experiment | None = None
) -> Experiment:
    """The preset with the choices of the command line: ``data``, number of ``sites``, and ``settings`` "key=value".

    ``like`` is a run on whose terms it is (``run.terms.like``). Weights to start from are named with their checksum.
    Raises ValueError for an unknown preset, data or setting.
    """
    from dataclasses import replace

    from fedvlp.data.synthetic.cohort import SyntheticCohort
    from fedvlp.run import presets, terms
    from fedvlp.run.config import override

    experiment = presets.get(preset)
    if like is not None:
        experiment = terms.like(experiment, like)
    margin = experiment.model.image_size * 9 // 8
    chosen = source_of(data, margin)
    if isinstance(chosen, SyntheticCohort):
        sites = sites or chosen.sites
        chosen = replace(chosen, image_size=getattr(experiment.data, "image_size", margin))
    if chosen is not None:
        experiment = replace(experiment, data=chosen)
    if sites is not None:
        experiment = override(experiment, "partition.sites", str(sites))
        if chosen is None or isinstance(chosen, SyntheticCohort):
            experiment = override(experiment, "data.sites", str(sites))
        if hasattr(experiment.extra, "sites"):
            experiment = override(experiment, "extra.sites", str(sites))
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r} has no '='; write --set method.rho=0.1")
        experiment = override(experiment, key, value)
    return experiment.pinned()


def source_of(data: str | None, image_size: int) -> Source | None:
    """The data set of ``--data``, decoded to squares of so many pixels; None for the preset's built-in cohort.

    Raises ValueError for an unknown source.
    """
    from fedvlp.data.sources import SOURCES
    from fedvlp.data.synthetic.cohort import COHORTS
    from fedvlp.deploy.named_data import NamedData
    from fedvlp.run.config import choose

    kind, _, rest = (data or "synthetic").partition(":")
    if kind == "named" and rest:
        return NamedData(rest, image_size)
    if rest:
        source: Any = choose("source of --data", kind, "SOURCES", SOURCES)
        chosen: Source = source(path=str(Path(rest).absolute()), image_size=image_size)
        return chosen
    if kind in COHORTS:
        return COHORTS[kind]
    if data not in (None, "synthetic"):
        known = ", ".join(["synthetic", *COHORTS])
        raise ValueError(f"--data is {data!r}; give {known} or table:PATH.csv (a job: named:NAME too)")
    return None
