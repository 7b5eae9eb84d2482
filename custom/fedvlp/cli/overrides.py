"""The settings that every command with an experiment accepts (preset, data, sites, --set), and plugins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedvlp.run.experiment import Experiment

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


def configured(preset: str, data: str | None, sites: int | None, settings: list[str] | None) -> Experiment:
    """The preset with the choices of the command line: ``data``, number of ``sites``, and ``settings`` "key=value".

    Raises ValueError for an unknown preset, data or setting.
    """
    from dataclasses import replace

    from fedvlp.data.sources import SOURCES
    from fedvlp.data.synthetic.cohort import COHORTS
    from fedvlp.deploy.named_data import NamedData
    from fedvlp.run import presets
    from fedvlp.run.config import choose, override

    experiment = presets.get(preset)
    kind, _, rest = (data or "synthetic").partition(":")
    margin = experiment.model.image_size * 9 // 8
    if kind == "named" and rest:
        experiment = replace(experiment, data=NamedData(rest, margin))
    elif rest:
        source = choose("source of --data", kind, "SOURCES", SOURCES)
        experiment = replace(experiment, data=source(path=str(Path(rest).absolute()), image_size=margin))
    elif kind in COHORTS:
        cohort = COHORTS[kind]
        pixels = getattr(experiment.data, "image_size", margin)
        experiment = replace(experiment, data=replace(cohort, image_size=pixels))
        sites = sites or cohort.sites
    elif data not in (None, "synthetic"):
        known = ", ".join(["synthetic", *COHORTS])
        raise ValueError(f"--data is {data!r}; give {known} or table:PATH.csv (a job: named:NAME too)")
    if sites is not None:
        experiment = override(experiment, "partition.sites", str(sites))
        if kind == "synthetic" or kind in COHORTS:
            experiment = override(experiment, "data.sites", str(sites))
        if hasattr(experiment.extra, "sites"):
            experiment = override(experiment, "extra.sites", str(sites))
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r} has no '='; write --set method.rho=0.1")
        experiment = override(experiment, key, value)
    return experiment
