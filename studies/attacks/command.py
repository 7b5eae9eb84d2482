"""`fedvlp attack`: what updates of a finished run's sites give away, and a leak that `fedvlp audit` must find."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedvlp.cli import known, panels

app = typer.Typer()


@app.command(rich_help_panel=panels.JUDGE)
def attack(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", callback=known.run_in)],
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Also plants a leak, which the attacks must find.")
    ] = True,
    invert: Annotated[
        float,
        typer.Option("--invert", help="Seconds to reconstruct images from a gradient; feasible for tiny towers alone."),
    ] = 0.0,
) -> None:
    """Attacks updates of a finished run, made anew without any policy: words, canaries, whose it is, images."""
    from rich.console import Console

    from fedvlp.run.folder import RunFolder
    from studies.attacks import measured

    folder = RunFolder(run)
    found = measured.measure(folder, controls, invert)
    console = Console()
    console.print(*(panels.plain_table(title, head, lines) for title, head, lines in found.tables()))
    for sentence in found.sentences():
        console.print(sentence, markup=False, highlight=False)
    print(f"wrote {measured.file_of(folder)}")
