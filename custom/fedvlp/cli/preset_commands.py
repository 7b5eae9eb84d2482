"""`fedvlp presets` and `fedvlp settings`: what there is to run, and what of it can be changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlp.cli import known, panels
from fedvlp.cli.overrides import Plugins, overridden, use_plugins
from fedvlp.cli.overrides import Setting as Set

if TYPE_CHECKING:
    from fedvlp.run.experiment import Experiment

app = typer.Typer()


@app.command(rich_help_panel=panels.TRAIN)
def presets(plugins: Plugins = None) -> None:
    """Lists the presets that `simulate` and `jobs export` take: fedvlp's, installed plugins', and those of --plugin."""
    from rich.console import Console

    from fedvlp.cli.panels import plain_table
    from fedvlp.run import plugins as others

    use_plugins(plugins)
    others.use_installed()
    groups: dict[str, list[list[str]]] = dict(known.index()["listed"])
    if others.in_use():
        from fedvlp.run.presets import get, groups_of_plugins, in_short

        for title, group in groups_of_plugins().items():
            groups[title] = [[name, said or _title(get(name)), *in_short(get(name))] for name, said in group.items()]
    for title, rows in groups.items():
        if rows:
            columns = ("preset", "what it is", "objective", "sites", "rounds")
            Console().print(plain_table(title, columns, rows, right=False))
    print("fedvlp settings PRESET shows what can be changed in one of them")


def _title(experiment: Experiment) -> str:
    """The first line of the method's file without its links."""
    import inspect
    import re

    title = (inspect.getdoc(inspect.getmodule(type(experiment.method))) or "").partition("\n")[0]
    return re.sub(r", https://[^\s)]+", "", title)


@app.command(rich_help_panel=panels.TRAIN)
def settings(
    preset: Annotated[str, typer.Argument(help="A preset, as `fedvlp presets` lists them.")],
    only: Annotated[str, typer.Argument(help="The settings whose names begin so, or hold it, e.g. method.")] = "",
    changes: Set = None,
    plugins: Plugins = None,
) -> None:
    """Lists every setting of a preset with its value, its default and its meaning; --set takes them by these names."""
    use_plugins(plugins)
    known.refuse_experiment(preset, settings=changes)
    from rich.console import Console

    from fedvlp.cli.panels import plain_table
    from fedvlp.run.config import nearest
    from fedvlp.run.presets import get, settings_of

    every = settings_of(overridden(get(preset), changes))
    chosen = [setting for setting in every if setting.key.startswith(only)]
    chosen = chosen or [setting for setting in every if only.casefold() in setting.key.casefold()]
    if not chosen:
        keys = [setting.key for setting in every]
        raise ValueError(f"{preset} has no setting whose name holds {only!r}{nearest(only, keys)}")
    rows = [
        (one.key, _shown(one.value), _unless_same(one.default, one.value), _explained(one.meaning, one.choices))
        for one in chosen
    ]
    columns = ("setting", "value", "default if other", "meaning")
    Console().print(plain_table(f"settings of {preset}", columns, rows, right=False))


def _shown(value: Any) -> str:
    """As `--set` takes it."""
    import json

    from fedvlp.run.config import to_config

    return value if isinstance(value, str) else json.dumps(to_config(value))


def _unless_same(default: Any, value: Any) -> str:
    """The default where the preset has another value."""
    return "" if default is None or default == value else _shown(default)


def _explained(meaning: str, choices: tuple[str, ...]) -> str:
    """The meaning, and what may stand in the place of a group of settings."""
    said = [meaning] if meaning else []
    return "; ".join([*said, f"one of {', '.join(choices)}"] if choices else said)
