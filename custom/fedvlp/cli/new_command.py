"""`fedvlp new`: files to start from, outside of the package."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Files to start from: a method of your own.")

TEMPLATES = Path(__file__).parent / "templates"


@app.callback()
def group() -> None:
    """Files to start from, outside of the package (docs/extending.md)."""


@app.command("method")
def new_method(
    name: Annotated[str, typer.Argument(help="Its name and its preset's: letters, digits and dashes, as my-method.")],
    into: Annotated[Path, typer.Option(help="Folder to write to.")] = Path(),
) -> None:
    """Writes a method with both halves and a preset, and its test. Both run as they are."""
    from fedvlp.core.validate import require_name
    from fedvlp.run.plugins import refuse_taken
    from fedvlp.run.presets import PRESETS

    module = name.replace("-", "_")
    if not module.isidentifier() or module != module.lower():
        raise ValueError(f"{name!r} is no name for a method; use lower-case letters, digits and dashes, as my-method")
    require_name("the name of a method", name)
    refuse_taken(module)
    if name in PRESETS:
        raise ValueError(f"fedvlp has a preset {name!r} already; choose another name")
    title = "".join(word.capitalize() for word in module.split("_"))
    if re.search(rf"\b{title}\b", templates()) or keyword.iskeyword(title):
        raise ValueError(
            f"the class would be called {title}, which means something else in its file; choose another name"
        )
    texts = {
        into / f"{prefix}{module}.py": written(f"{prefix}my_method.py.txt", name, module, title)
        for prefix in ("", "test_")
    }
    for file in texts:
        if file.exists():
            raise FileExistsError(f"{file} is there already; choose another name, or another folder with --into")
    into.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}")
    file, test = texts
    print(f"run it:  fedvlp simulate {name} --plugin {file}\ntest it: python -m pytest {test}")


def templates() -> str:
    """The text of all templates, without the class that is renamed."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(TEMPLATES.iterdir()))
    return text.replace("MyMethod", "")


def written(template: str, name: str, module: str, title: str) -> str:
    """A template with the method's names in the place of its own."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    return text.replace("my_method", module).replace("my-method", name).replace("MyMethod", title)
