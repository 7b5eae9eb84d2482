"""What ``--config FILE`` says: a preset and settings as TOML, or the ``config.json`` of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedvlp.run.experiment import Experiment


@dataclass(frozen=True)
class ConfigFile:
    """A file's content, or that of none; ``experiment`` is given by a run's alone, and is all of it."""

    preset: str | None = None
    data: str | None = None
    sites: int | None = None
    settings: tuple[str, ...] = ()  # "method.rho=0.5", as --set takes them
    experiment: Experiment | None = None

    def base(self, preset: str | None) -> str | Experiment:
        """What the settings are changes of: the preset of the command line, or else the file's.

        Raises ValueError without either, and for a preset beside a run's config.json, which has its own method.
        """
        if self.experiment is not None and preset is not None:
            raise ValueError(f"--config is a run's, which says what is trained; leave the preset {preset!r} out")
        base = self.experiment or preset or self.preset
        if base is None:
            raise ValueError("no preset; name one (`fedvlp presets` lists them), or give --config FILE with one")
        return base


WORDS = {"preset": str, "data": str, "sites": int}
"""What stands above a file's settings, as the options of these names take it."""


def read(path: Path) -> ConfigFile:
    """The content of a file that ends in .toml or .json. Raises ValueError that says what is wrong, and where."""
    kinds = {".toml": _of_toml, ".json": _of_run}
    if path.suffix not in kinds:
        raise ValueError(f"--config is {path.name!r}; expected a file that ends in .toml, or the config.json of a run")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"--config {path.name}: {why}") from None
    try:
        return kinds[path.suffix](text)
    except ValueError as error:
        raise ValueError(f"--config {path.name}: {error}") from None


def _of_toml(text: str) -> ConfigFile:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content = tomllib.loads(text)
    for name, kind in WORDS.items():
        if name in content and not isinstance(content[name], (kind, dict)):  # [data] is a section of settings
            raise ValueError(f"{name} is {content[name]!r}; expected a {kind.__name__}, as --{name} takes it")
    words = {name: content.pop(name) for name in WORDS if not isinstance(content.get(name), (dict, type(None)))}
    return ConfigFile(**words, settings=tuple(f"{key}={value}" for key, value in _settings(content)))


def _settings(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """("method.rho", "0.5") of every value of a table and its sections, in the file's order."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{above}{key}.")
        elif isinstance(value, str):
            yield above + key, value
        elif isinstance(value, (bool, int, float, list)):
            yield above + key, json.dumps(value)
        else:
            kind = type(value).__name__
            raise ValueError(f"{above}{key} is a {kind}; expected a number, text, true, false or a list")


def _of_run(text: str) -> ConfigFile:
    from fedvlp.run.config import from_config
    from fedvlp.run.experiment import Experiment

    experiment = from_config(json.loads(text))
    if not isinstance(experiment, Experiment):
        raise ValueError("no experiment; expected the config.json in the folder of a run")
    return ConfigFile(experiment=experiment)
