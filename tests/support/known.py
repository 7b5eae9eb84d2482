"""Writes cli/known.json, the names that commands check before they import torch.

PYTHONPATH=tests python -m support.known
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from fedvlp.cli import known
from fedvlp.core.names import name_of
from fedvlp.data.sources import SOURCES
from fedvlp.data.synthetic.drawn_cohort import COHORTS
from fedvlp.run.evaluate import DOWNSTREAM, EVALUATIONS
from fedvlp.run.presets import GROUPS, PRESETS, in_short

FILE = Path(known.__file__).with_name("known.json")


def content() -> str:
    """The file as the code wants it, one entry a line."""
    presets = {name: tree(experiment) for name, experiment in PRESETS.items()}
    sources = {name: of_class(kind) for name, kind in SOURCES.items()}
    classes = {name_of(kind): hints(kind) for value in PRESETS.values() for kind in kinds(value)}
    classes |= {name_of(kind): hints(kind) for kind in SOURCES.values()}
    listed = {
        title: [[name, said, *in_short(PRESETS[name])] for name, said in group.items()]
        for title, group in GROUPS.items()
    }
    made = {
        "listed": listed,
        "presets": presets,
        "sources": sources,
        "cohorts": dict.fromkeys(COHORTS, ""),
        "evaluations": {name: "model" if name in DOWNSTREAM else "run" for name in EVALUATIONS},
        "classes": dict(sorted(classes.items())),
    }
    parts = (
        f"{json.dumps(part)}: {{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in of.items()) + "\n}"
        for part, of in made.items()
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def tree(value: Any) -> dict[str, Any]:
    """A group of settings with its class and the groups in it."""
    return {"": name_of(type(value)), **{name: tree(inner) for name, inner in groups(value)}}


def groups(value: Any) -> Iterator[tuple[str, Any]]:
    return ((f.name, inner) for f in fields(value) if is_dataclass(inner := getattr(value, f.name)))


def kinds(value: Any) -> Iterator[type]:
    yield type(value)
    for _, inner in groups(value):
        yield from kinds(inner)


def of_class(kind: type) -> dict[str, Any]:
    """The same of a class whose settings have no other groups by default."""
    defaults = (f.default if f.default is not MISSING else f.default_factory for f in fields(kind))
    assert not any(map(is_dataclass, defaults)), kind
    return {"": name_of(kind)}


def hints(kind: type) -> dict[str, str]:
    """The declared type of every setting; "object" where it is one of fedvlp's."""
    return {f.name: str(f.type) if built_in(str(f.type)) else "object" for f in fields(kind)}


def built_in(hint: str) -> bool:
    try:
        eval(hint, {})
    except NameError:
        return False
    return True


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
    print(FILE)
