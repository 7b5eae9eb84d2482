"""Experiments as JSON: nested ``{"path": class, "args": {...}}``, the form that FLARE's component builder reads too."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from fedvlp import __version__
from fedvlp.core.names import name_of
from fedvlp.run import plugins

ROOT = "fedvlp."


def to_config(value: Any) -> Any:
    """A dataclass as ``{"path", "args"}`` with every field (defaults included), other values as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        args = {f.name: to_config(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"path": name_of(kind), "args": args}
    if isinstance(value, (list, tuple)):
        return [to_config(item) for item in value]
    return value


def from_config(config: Any) -> Any:
    """The object that :func:`to_config` described. Raises ValueError for what does not describe one.

    Only dataclasses of fedvlp and of plugins (run/plugins.py) are built; no other module is imported.
    """
    if isinstance(config, list):
        return tuple(from_config(item) for item in config)
    if not isinstance(config, dict):
        return config
    path = config.get("path", "")
    kind = _class_of(path) if isinstance(path, str) else None
    if kind is None:
        raise ValueError(
            f"config names {path!r}; expected a configuration class of fedvlp, or of a plugin that is installed or "
            "given with --plugin"
        )
    given = config.get("args", {})
    if not isinstance(given, dict):
        raise ValueError(f'{path}: "args" holds a {type(given).__name__}, expected an object')
    args = {key: from_config(value) for key, value in given.items()}
    known = fields_of(kind)
    for key in args:
        if key not in known:
            raise ValueError(f"{path} has no {key!r}{nearest(key, known)}")
        refuse_misfit(kind, key, args[key])
    try:
        return kind(**args)
    except TypeError as error:  # a field without a default is not given
        raise ValueError(f"{path}: {error}") from None


def _class_of(path: str) -> type | None:
    """The dataclass of a path that a file names, or None. Imports modules of fedvlp and of plugins alone."""
    module, _, name = path.rpartition(".")
    ours = path.startswith(ROOT)
    if not ours and plugins.admitted(module) is None:
        return None
    try:
        kind = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return None
    # What a plugin has imported from elsewhere is not the plugin's.
    return kind if ours or kind.__module__ == module else None


def described(value: Any) -> dict[str, Any]:
    """:func:`to_config`, and under "plugins" the digest of every plugin whose class it names, if there is one."""
    config: dict[str, Any] = to_config(value)
    digests = plugins.digests(value)
    return config | ({"plugins": digests} if digests else {})


def identity(value: Any, folder: str) -> dict[str, str]:
    """What a server says of its run, of the experiment ``value`` in ``folder``, with every task.

    By the fingerprint and the wire version a site knows whether the task is for it (flare/task_handler.py); the version
    of fedvlp is for people.
    """
    from fedvlp.core.types import WIRE_VERSION  # with torch, which commands that refuse their arguments do not wait for

    return {
        "folder": folder,
        "fingerprint": fingerprint(value),
        "version": __version__,
        "wire": str(WIRE_VERSION),
    }


def fingerprint(value: Any) -> str:
    """A hash of the configuration and of its plugins: equal at the server and at the sites of one run."""
    return hashlib.blake2b(json.dumps(described(value), sort_keys=True).encode(), digest_size=8).hexdigest()


def choose(what: str, key: str, name: str, own: Mapping[str, Any]) -> Any:
    """The entry ``key`` of the table ``name`` of fedvlp (``own``) and of plugins (``plugins.TABLES``).

    Raises ValueError, which calls ``key`` an unknown ``what``, names the nearest and lists them all.
    """
    known = plugins.table(name, own, key)
    if key not in known and (same := [one for one in known if one.casefold() == key.casefold()]):
        raise ValueError(f"unknown {what} {key!r}; did you mean {same[0]!r}? Upper and lower case count")
    if key not in known:
        raise ValueError(f"unknown {what} {key!r}{nearest(key, list(known))}; there are: {', '.join(known)}")
    return known[key]


def choose_preset(name: str, own: Mapping[str, Any]) -> Any:
    """The preset ``name``, of fedvlp (``own``) or of a plugin. Raises ValueError naming the nearest one."""
    try:
        return choose("preset", name, "PRESETS", own)
    except plugins.PluginError:
        raise
    except ValueError as error:
        raise ValueError(f"{error}. A preset of your own file needs --plugin FILE.py") from None


def override(value: Any, key: str, text: str) -> Any:
    """``value`` with the field ``key`` ("method.rho") set to ``text``, read as JSON or else as a string.

    Raises ValueError naming the nearest field when there is no such one, or what the field holds when it does not fit.
    """
    head, _, rest = key.partition(".")
    names = fields_of(value)
    if head not in names:
        inside = [f"{name}.{head}" for name in names if head in _inside(getattr(value, name))]
        meant = f"; did you mean {' or '.join(inside)}?" if inside else nearest(head, names)
        raise ValueError(f"unknown setting {head!r}{meant}; there are: {', '.join(sorted(names))}")
    old = getattr(value, head)
    if rest:
        if not dataclasses.is_dataclass(old):
            raise ValueError(f"{head!r} is a plain value and has no setting {rest!r}")
        return dataclasses.replace(value, **_to_follow(value, head), **{head: override(old, rest, text)})
    if dataclasses.is_dataclass(old):
        return dataclasses.replace(value, **_to_follow(value, head), **{head: _chosen(value, head, old, text)})
    return dataclasses.replace(value, **{head: _read(text, value, head)})


def _to_follow(owner: Any, name: str) -> dict[str, Any]:
    """The other groups of ``owner`` with values that follow the group ``name`` (metadata), these at their defaults.

    They are filled in anew; what they followed before would look like a value of their own.
    """
    loosened = {}
    for other in set(fields_of(owner)) - {name}:
        group = getattr(owner, other)
        settings = dataclasses.fields(group) if dataclasses.is_dataclass(group) else ()
        following = [f for f in settings if f.metadata.get("follows", "").partition(".")[0] == name]
        if following:
            loosened[other] = dataclasses.replace(group, **{f.name: f.default for f in following})
    return loosened


def _chosen(owner: Any, name: str, old: Any, text: str) -> Any:
    """The group of settings that ``text`` names among the field's "choices" (metadata), with its defaults."""
    field = next(f for f in dataclasses.fields(owner) if f.name == name)
    choices = field.metadata.get("choices", {})
    if choices:
        choices = plugins.table(field.metadata["table"], choices, text)
    if text in choices:
        return choices[text]()
    known = f"choose one of {', '.join(choices)}, or " if choices else ""
    raise ValueError(f"{name!r} is a group of settings; {known}set one of them, e.g. {name}.{fields_of(old)[0]}")


def _read(text: str, owner: Any, name: str) -> Any:
    """``text`` as the type of the field ``name``: JSON where that fits, else the text itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    if isinstance(value, list):
        value = tuple(value)
    if not fits(value, type_of(type(owner), name)):
        value = text
    refuse_misfit(type(owner), name, value)
    return float(value) if isinstance(getattr(owner, name), float) and isinstance(value, int) else value


def type_of(kind: type, name: str) -> Any:
    """The declared type of a field."""
    return _types_of(kind)[name]


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value has the declared type (a whole number is a float, too); groups check themselves."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(fits(value, option) for option in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind is types.NoneType:
        return value is None
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return kind not in (str, bool, tuple) or isinstance(value, kind)


def refuse_misfit(kind: type, name: str, value: Any) -> None:
    """Raises ValueError unless the value has the type of the field."""
    hint = type_of(kind, name)
    if not fits(value, hint):
        wanted = getattr(hint, "__name__", str(hint))
        wanted = {"int": "a whole number", "float": "a number, e.g. 0.1"}.get(wanted, wanted)
        raise ValueError(f"{name} is {value!r}; {kind.__name__}.{name} takes {wanted}")


def fields_of(value: Any) -> list[str]:
    """Names of the settings of a dataclass."""
    return [f.name for f in dataclasses.fields(value)]


def _inside(group: Any) -> list[str]:
    """Names of the settings of a group; none of a plain value."""
    return fields_of(group) if dataclasses.is_dataclass(group) else []


def nearest(name: str, known: list[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing."""
    begin = [one for one in known if one.startswith(f"{name.removesuffix('s')}_column")]  # labels, masks, reports
    close = begin or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
