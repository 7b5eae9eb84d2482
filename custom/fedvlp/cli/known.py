"""What presets, settings, data sets and evaluations there are, for checks that come before torch is imported.

``known.json`` says it; ``make docs`` writes that file from the code, and a test compares the two. What passes here is
checked again, with its values, by the code itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

OPTION = re.compile(r",\s*(?=[a-z_]+=)|,\s*$")
"""Stands before each setting that follows the folder of a data set, or at the end; values may have commas."""

COHORT = "fedvlp.data.SyntheticCohort"

Tree = Mapping[str, Any]
"""A group of settings: under "" the public name of its class, and under a setting's name the group that it is."""


@cache
def index() -> dict[str, Any]:
    """Trees by name: ``presets``, ``sources``; names: ``cohorts``, ``evaluations``; ``classes``: types by setting.

    ``listed`` are the rows of `fedvlp presets` by title.
    """
    made: dict[str, Any] = json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))
    return made


def stand_in(tree: Tree) -> Any:
    """An object with the settings of a group and their types, but no values and no ranges, for ``config.override``."""
    name: str = tree[""]
    settings = [(setting, hint, field(default=None)) for setting, hint in index()["classes"][name].items()]
    kind = make_dataclass(name.rpartition(".")[2], settings, frozen=True, namespace={"__module__": __name__})
    return kind(**{setting: stand_in(inner) for setting, inner in tree.items() if setting})


def refuse_experiment(
    preset: str, data: str | None = None, at: Sequence[str] | None = None, settings: Sequence[str] | None = None
) -> None:
    """Raises ValueError for an unknown preset, data set or setting, a value of another type, a file that is not there.

    Arguments as those of ``overrides.configured``. A plugin's presets and data sets are left to that.
    """
    from fedvlp.run.config import choose_preset

    tree: Tree = choose_preset(preset, index()["presets"])
    source = None if data is None else data_set(data)
    for _, spec in map(split_site, at or ()):
        data_set(spec)
    if preset not in index()["presets"]:
        return
    # Which settings a group has is known as long as nothing puts another group in its place.
    elsewhere = {key for setting in settings or () for key in tree if setting.startswith(f"{key}=")}
    if source is not None:
        tree = {**tree, "data": source}
    elif data is not None or at:
        elsewhere.add("data")
    overridden(stand_in(tree), [one for one in settings or () if re.split(r"[.=]", one)[0] not in elsewhere])


def overridden(value: T, settings: Sequence[str] | None) -> T:
    """``value`` with every setting "key=value" of ``--set``, in any order; of one that is set twice, the last.

    Raises ValueError for one without "=", an unknown one, and a value that does not fit the others.
    """
    from fedvlp.run.config import override

    pending: dict[str, str] = {}
    for setting in settings or []:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r} has no '='; write --set method.rho=0.1")
        pending.pop(key, None)
        pending[key] = text
    while pending:
        refused: dict[str, ValueError] = {}
        for key, text in pending.items():
            try:
                value = override(value, key, text)
            except ValueError as error:  # it may fit once the others are set
                refused[key] = error
        if len(refused) == len(pending):
            raise next(iter(refused.values()))
        pending = {key: pending[key] for key in refused}
    return value


def split_site(given: str) -> tuple[str, str]:
    """("north", "nih_cxr14:FOLDER") of "north=nih_cxr14:FOLDER". Raises ValueError for another form."""
    name, equals, spec = given.partition("=")
    if not (name and equals and spec):
        raise ValueError(f"--site {given!r} is not NAME=SOURCE:FOLDER; write --site north=nih_cxr14:FOLDER")
    return name, spec


def data_set(data: str) -> Tree | None:
    """The settings of the data set of ``--data``; None for the sites' own and for a plugin's.

    Raises ValueError for an unknown one, for a path that is not there, and for an unknown setting behind it.
    """
    from fedvlp.run.config import override

    kind, _, rest = data.partition(":")
    sources, cohorts = index()["sources"], ["synthetic", *index()["cohorts"]]
    if not rest and data in cohorts:
        return {"": COHORT}
    if not rest:
        meant = Path(data)
        if meant.exists():
            form = f"SOURCE:{data}, e.g. mimic_cxr:{data}" if meant.is_dir() else f"table:{data}"
            raise ValueError(f"--data is {data!r}; what it is stands before it: {form}")
        raise ValueError(f"--data is {data!r}; give {', '.join(cohorts)} or table:PATH.csv (a job: named:NAME too)")
    if kind == "named":
        return None
    if (run := run_of(data)) is not None:
        run_in(run)
        return None
    location, *options = OPTION.split(rest)
    options = list(filter(None, options))
    choose_source(kind, sources)
    if not Path(location).absolute().exists():
        raise ValueError(f"{kind} source: {location!r} is not there; give its table, or the folder of a collection")
    if kind not in sources:
        return None
    for option in options:
        key, _, value = option.partition("=")
        override(stand_in(sources[kind]), key, value)
    tree: Tree = sources[kind]
    return tree


def choose_source(kind: str, own: Mapping[str, Any]) -> Any:
    """The source ``kind`` of ``--data``, of fedvlp (``own``) or of a plugin, which may have several sites of its own.

    Raises ValueError for an unknown one.
    """
    from fedvlp.run.config import choose
    from fedvlp.run.plugins import table

    federations = {} if kind in own else table("FEDERATIONS", {}, kind)
    return choose("source of --data", kind, "SOURCES", {**own, **federations})


OF_RUN = "run"
"""Stands in ``--data`` before the folder of a run, whose records are meant, partitioned as there."""


def run_of(data: str) -> Path | None:
    """The run whose records ``--data`` names; None where it names none."""
    kind, _, rest = data.partition(":")
    return Path(OPTION.split(rest)[0]) if kind == OF_RUN and rest else None


def refuse_evaluation(what: str, folder: Path) -> None:
    """Raises ValueError for an unknown evaluation, and for a folder without what it measures."""
    from fedvlp.run.config import choose

    choose("evaluation", what, "EVALUATIONS", index()["evaluations"])
    if what in index()["evaluations"]:
        (model_in if index()["evaluations"][what] == "model" else run_in)(folder)


def run_in(folder: Path) -> Path:
    """The folder, as an argument of a command. Raises ValueError where it holds no run."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no run: config.json is missing there{_newest_in(folder)}")
    return folder


def _newest_in(folder: Path) -> str:
    """The newest run below a folder that holds runs, as the end of a sentence; "" where it holds none."""
    runs = [path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/config.json")]
    runs = [run for run in runs if run.name.isdigit()]
    if not runs:
        return ""
    newest = max(runs, key=lambda run: (run.stat().st_mtime, run.name))
    return f"; it is a folder of runs, so give one of them: the newest is {newest}"


def run_if_given(folder: Path | None) -> Path | None:
    """The same of an option that may be left out."""
    return folder and run_in(folder)


def model_in(folder: Path) -> Path:
    """The folder, as an argument of a command. Raises ValueError where it holds neither a run nor a model."""
    if not any((path / "config.json").exists() for path in (folder, folder / "model")):
        raise ValueError(
            f"{folder} holds no trained model; give the folder of a run that has finished{_newest_in(folder)}"
        )
    return folder
