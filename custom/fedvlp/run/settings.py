"""What `--set` can change in an experiment: every setting, its value, and what its field's comment says it means."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from fedvlp.run.experiment import Experiment

FIELD = re.compile(r"^ {4}(\w+): [^#]*(?:  # (.+))?$")
"""A field of a dataclass, and the comment behind it."""

CONTINUED = re.compile(r"^ {4,}# {2,}(\S.*)$")
"""The next line of that comment, which is indented behind its sign."""

ABOVE = re.compile(r"^ {4}# (\S.*)$")
"""A comment on the field in the next line."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting as `--set KEY=VALUE` takes it."""

    key: str  # "method.rho"
    value: Any  # of the experiment
    default: Any  # of its class; None where there is none
    meaning: str  # with its range; "" where the field has no comment
    choices: tuple[str, ...] = ()  # of a group that can be replaced as a whole


def settings_of(experiment: Experiment) -> list[Setting]:
    """Every setting, group by group in the order of the configuration. Values that follow others are filled in."""
    return list(_settings(experiment, ""))


def _settings(group: Any, above: str) -> Iterator[Setting]:
    kind: type = type(group)
    meanings = _comments(kind)
    for field in dataclasses.fields(group):
        if not field.init or not (above or field.name != "name"):
            continue
        key, value, meaning = above + field.name, getattr(group, field.name), meanings.get(field.name, "")
        choices = tuple(field.metadata.get("choices", ()))
        if dataclasses.is_dataclass(value):
            yield Setting(key, type(value).__name__, None, meaning, choices)
            yield from _settings(value, f"{key}.")
        else:
            yield Setting(key, value, _default(field), meaning, choices)


def _default(field: dataclasses.Field[Any]) -> Any:
    return None if field.default is dataclasses.MISSING else field.default


@cache
def _comments(kind: type) -> dict[str, str]:
    """Field -> comment, of a class and of those that it has its fields from."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            meanings |= _comments_in(textwrap.dedent(inspect.getsource(base)))
    return meanings


def _comments_in(source: str) -> dict[str, str]:
    """Field -> comment: what stands behind it, with the lines that go on, or else above it."""
    meanings: dict[str, str] = {}
    name, above = "", ""
    for line in source.splitlines():
        if field := FIELD.match(line):
            name = field[1]
            meanings[name] = field[2] or above
        elif (continued := CONTINUED.match(line)) and name:
            meanings[name] += f" {continued[1]}"
        comment = ABOVE.match(line)
        above = f"{above} {comment[1]}".strip() if comment else ""
    return {name: meaning for name, meaning in meanings.items() if meaning}
