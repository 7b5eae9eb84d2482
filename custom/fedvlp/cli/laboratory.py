"""Commands of other distributions, by entry point; a study that is not installed says where it is."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

GROUP = "fedvlp.commands"
"""The entry points whose values are Typer applications, one command each."""

STUDIES = ("attack", "claims", "reproduce")

app = typer.Typer()
"""Empty until :func:`add_installed`: importing fedvlp imports no other distribution."""


def add_installed() -> None:
    """Adds every command that an entry point names; in place of a study that is not installed, where it is. Once."""
    if app.registered_groups or app.registered_commands:
        return
    named = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in dict.fromkeys((*STUDIES, *named)):
        if name in named:
            app.add_typer(named[name].load())
        else:
            anything = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(name, hidden=True, context_settings=anything, add_help_option=False)(_elsewhere)


def _elsewhere(context: typer.Context) -> None:
    """Raises ValueError: where the study is."""
    raise ValueError(
        f"{context.info_name} is a study, and not part of what is installed at a site; in a clone of fedvlp's "
        "repository it is in studies/: `pip install --no-deps -e studies` adds the command"
    )
