"""`fedvlp reproduce`: a table or figure of the five papers, cell by cell, with the printed values beside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvlp.cli import panels
from fedvlp.cli.overrides import OPTION, AcceptAll, AcceptKinds, accepted, seeds_of
from fedvlp.cli.stopping import goes_on_as_typed

if TYPE_CHECKING:
    from rich.console import Console

    from studies.reproduce.table import Entry, Size

app = typer.Typer()


@app.command(rich_help_panel=panels.JUDGE)
def reproduce(
    table: Annotated[
        str | None, typer.Argument(help="PAPER:TABLE, e.g. feddra:2 or creamfl:f4; --list has all.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="On the built-in cohort, with the shipped tiny encoders.")
    ] = False,
    root: Annotated[
        Path | None, typer.Option(help="On the paper's data: a folder with a folder mimic_cxr, rsna, ... for each.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="SOURCE:FOLDER[,SETTING=VALUE], a data set elsewhere than in --root; may be repeated."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="FIRST-LAST.")] = "0-2",
    jobs: Annotated[int, typer.Option(help="Cells at a time; 0: shows what has finished, and runs nothing.")] = 2,
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this row; may be repeated.")] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Where the runs are kept; stopped, it goes on there.")] = Path(
        "runs/reproduce"
    ),
    results: Annotated[
        Path | None, typer.Option(help="Files of finished cells, read and added to; default: results/ in --runs.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the decoded images of --root, the same when it goes on; default: images/ in --runs."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Says what it would take, and runs nothing.")] = False,
    smallest: Annotated[
        bool,
        typer.Option("--smallest", help="A step or two a cell on tiny towers, to see that it runs; no figure counts."),
    ] = False,
    accept_phi_risk: AcceptAll = False,
    accept_phi_kind: AcceptKinds = None,
    listed: Annotated[bool, typer.Option("--list", help="Only says which tables there are, and which run.")] = False,
) -> None:
    """Runs or resumes a table of a paper, and writes it with the paper's values beside: Markdown, CSV, HTML."""
    from rich.console import Console

    from studies.reproduce import inventory
    from studies.reproduce.output import markdown, title, write
    from studies.reproduce.run import chosen_rows
    from studies.reproduce.run import reproduce as run

    console = Console(markup=False)
    if listed:
        _list(console)
        return
    if table is None:
        raise ValueError("reproduce: no table; give PAPER:TABLE, e.g. feddra:2 (`fedvlp reproduce --list` has all)")
    asked = inventory.get(table)
    if not asked.runs:
        raise ValueError(f"reproduce: {asked.key} ({asked.title}) does not run: {asked.why_not}")
    size = _size(demo, root, data or [], smallest, cache or runs / "images")
    accept = accepted(accept_phi_risk, accept_phi_kind)
    entries = [chosen_rows(entry.at(size), only or []) for entry in inventory.shown(asked)]
    wanted, files = seeds_of(seeds), results or runs / "results"
    if dry_run:
        for entry in entries:
            _estimated(console, entry, size, wanted, files, jobs)
        return

    goes_on_as_typed()

    def said(cell: str, seed: int, what: str) -> None:
        console.print(f"{cell}, seed {seed}: {what}", highlight=False)

    every = []
    for entry in entries:
        console.print(title(entry), highlight=False)
        every.append(run(entry, size, wanted, runs, files, jobs, said, accept))
        print(markdown(every[-1]))
    for file in write(runs, f"{asked.key.replace(':', '-')}-{size.label}", every, title(asked)):
        print(f"wrote {file}")


def _size(demo: bool, root: Path | None, data: list[str], smallest: bool, cache: Path) -> Size:
    """The size that was asked for. Raises ValueError unless it is of one of the demo and the paper's data."""
    from studies.reproduce.table import DEMO, PAPER, SMALLEST, Size

    if demo == (root is not None):
        raise ValueError(
            "reproduce: give --demo (the built-in cohort, tiny towers), or --root with the folder of the paper's data, "
            "and not both; --smallest takes a step or two on either"
        )
    if root is not None and not root.is_dir():
        raise ValueError("reproduce: --root is no folder; give the one that has a folder for each data set")
    specs = [spec.partition(":") for spec in data]
    if strange := [name for name, _, where in specs if not where]:
        raise ValueError(f"reproduce: --data {strange[0]!r} is not SOURCE:FOLDER, e.g. mimic_cxr:FOLDER,reports=FOLDER")
    if data and root is None:
        raise ValueError("reproduce: --data goes with --root, the folder of the paper's other data")
    elsewhere = {name: OPTION.split(where) for name, _, where in specs}
    name = SMALLEST if smallest else PAPER if root else DEMO
    return Size(name, root, elsewhere, cache if root else None)


def _list(console: Console) -> None:
    """Every measured row of the inventory, and what is no measured row."""
    from fedvlp.cli.panels import plain_table
    from studies.reproduce.inventory import ENTRIES, NOT_MEASURED

    rows = []
    for entry in ENTRIES:
        where = ", ".join([*([] if entry.no_demo else ["--demo"]), *(["--root"] if entry.sources else [])])
        if entry.shows:
            where = f"as {', '.join(f'{entry.paper}:{name}' for name in entry.shows)}"
        rows.append((entry.key, entry.title, where if entry.runs else "no", entry.why_not or entry.no_demo))
    count = sum(entry.runs for entry in ENTRIES)
    heading = f"{len(ENTRIES)} measured tables and figures, of which {count} run"
    console.print(plain_table(heading, ("table", "shows", "runs", "why not"), rows, right=False))
    console.print(plain_table("not measured", ("paper", "tables, figures", "why"), NOT_MEASURED, right=False))


def _estimated(console: Console, entry: Entry, size: Size, seeds: range, files: Path, jobs: int) -> None:
    """Cells, time and bytes of a table."""
    from studies.reproduce.output import title
    from studies.reproduce.run import estimate

    said = estimate(entry, size, seeds, files)
    console.print(title(entry), highlight=False)
    console.print(
        f"cells: {said.cells}, of which {said.done} have finished ({', '.join(entry.cells())})", highlight=False
    )
    if said.seconds is None:
        time = "not known"
    else:
        time = f"about {said.seconds / 60 / max(1, jobs):.0f} minutes with {max(1, jobs)} cells at a time"
    console.print(f"time: {time}; estimated from: {said.from_what}", highlight=False)
    left = said.cells - said.done - said.bytes_of
    rest = f"; of {left} cells they are known only after a run" if left else ""
    console.print(f"bytes on the wire, both ways: {said.bytes / 1e6:,.0f} MB{rest}", highlight=False)
