"""`fedvlp sweep`: presets with several seeds and settings, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvlp.cli import known, panels
from fedvlp.cli.overrides import (
    OPTION,
    AcceptAll,
    AcceptKinds,
    Cache,
    Data,
    OwnSources,
    Plugins,
    Setting,
    Sites,
    accepted,
    configured,
    seeds_of,
    use_plugins,
)
from fedvlp.cli.stopping import goes_on_as_typed

if TYPE_CHECKING:
    from rich.console import Console

    from fedvlp.run.sweep import Table

app = typer.Typer()


@app.command(rich_help_panel=panels.TRAIN)
def sweep(
    presets: Annotated[list[str], typer.Argument(help="As `fedvlp presets` lists them.")],
    seeds: Annotated[str, typer.Option(help="FIRST-LAST: of the runs, and of data that are drawn or split.")] = "0-2",
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", help="SETTING=VALUE,VALUE,...; may be repeated: every combination is run."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0: shows what has finished, and runs nothing.")] = 2,
    settings: Setting = None,
    data: Data = None,
    sites: Sites = None,
    site: OwnSources = None,
    cache: Cache = None,
    runs: Annotated[Path, typer.Option("--runs", help="Where the runs are kept; stopped, it resumes there.")] = Path(
        "runs/sweep"
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Lists the runs that it would make, and makes none.")
    ] = False,
    accept_phi_risk: AcceptAll = False,
    accept_phi_kind: AcceptKinds = None,
    plugins: Plugins = None,
) -> None:
    """Runs presets with several seeds and settings, resumes where it was stopped, and compares them.

    Differences are paired by seed, from the first preset with the first values. A preset without a setting of --grid
    runs once for all its values.
    """
    use_plugins(plugins)
    accept = accepted(accept_phi_risk, accept_phi_kind)
    for preset in presets:
        known.refuse_experiment(preset, data, site, settings)
    from rich.console import Console

    from fedvlp.core.validate import counted
    from fedvlp.run import sweep as of
    from fedvlp.run.fitting import absolute

    console = Console(markup=False, highlight=False)
    values = of.grid_of(grid or [])
    of_data = [f"data.{option}" for option in OPTION.split(data or "")[1:] if option]
    of.refuse_own([*values, *(setting.partition("=")[0] for setting in [*(settings or []), *of_data])])
    asked = {preset: configured(preset, data, sites, settings, site, cache) for preset in presets}
    every, wanted = of.variants(asked, values), seeds_of(seeds)
    console.print(f"{len(every) * len(wanted)} cells, {jobs} at a time")
    if dry_run:
        for variant, experiment in every.items():
            console.print(f"{variant}: {counted(experiment.rounds.rounds, 'round')}, seeds {seeds}")
        return console.print("what one of them takes: fedvlp simulate PRESET --dry-run, with the same options")

    goes_on_as_typed()

    def said(variant: str, seed: int, what: str) -> None:
        console.print(f"{variant}, seed {seed}: {what}")

    from_anywhere = {variant: absolute(experiment) for variant, experiment in every.items()}  # --grid may name folders
    table = of.swept(from_anywhere, wanted, runs, jobs, said, accept)
    if not table.cells:
        raise ValueError("sweep: no cell has finished; run it with --jobs 1 or more")
    console.print(table.origin())
    _say(console, table)
    for file in of.write(table, runs):
        print(f"wrote {file}")


def _say(console: Console, table: Table) -> None:
    """Prints what the cells reached: a table for each figure, since a terminal would cut one of all off."""
    from fedvlp.cli.panels import plain_table
    from fedvlp.run.sweep import as_rows

    heading, rows = as_rows(table)
    print("mean (SD) over seeds, %; differences with 95 % intervals")
    for first in range(2, len(heading), 2):
        chosen = [0, 1, first, first + 1]
        cells = [[row[index] for index in chosen] for row in rows]
        console.print(plain_table("", [heading[index] for index in chosen], cells))
