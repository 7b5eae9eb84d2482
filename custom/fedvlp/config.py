"""Experiments as JSON: nested ``{"path": class, "args": {...}}``, the form that FLARE's component builder reads too."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import json
from typing import Any

ROOT = "fedvlp."


def to_config(value: Any) -> Any:
    """A dataclass as ``{"path", "args"}`` with every field (defaults included), other values as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        args = {f.name: to_config(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"path": f"{kind.__module__}.{kind.__qualname__}", "args": args}
    if isinstance(value, (list, tuple)):
        return [to_config(item) for item in value]
    return value


def from_config(config: Any) -> Any:
    """The object that :func:`to_config` described. Only dataclasses of fedvlp are built; anything else is refused."""
    if isinstance(config, list):
        return tuple(from_config(item) for item in config)
    if not isinstance(config, dict):
        return config
    path = config.get("path", "")
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name, None) if path.startswith(ROOT) else None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"config names {path!r}; expected a configuration class of fedvlp")
    args = {key: from_config(value) for key, value in config.get("args", {}).items()}
    known = [f.name for f in dataclasses.fields(kind)]
    for key in args:
        if key not in known:
            raise ValueError(f"{path} has no {key!r}{nearest(key, known)}")
    return kind(**args)


def fingerprint(value: Any) -> str:
    """A hash of the configuration: equal at the server and at the sites of one run."""
    return hashlib.blake2b(json.dumps(to_config(value), sort_keys=True).encode(), digest_size=8).hexdigest()


def override(value: Any, key: str, text: str) -> Any:
    """``value`` with the field ``key`` ("method.rho") set to ``text``, read as JSON or else as a string.

    Raises ValueError naming the nearest field when there is no such one, or what the field holds when it does not fit.
    """
    head, _, rest = key.partition(".")
    names = [f.name for f in dataclasses.fields(value)]
    if head not in names:
        raise ValueError(f"unknown setting {head!r}{nearest(head, names)}; there are: {', '.join(sorted(names))}")
    old = getattr(value, head)
    if rest:
        if not dataclasses.is_dataclass(old):
            raise ValueError(f"{head!r} is a plain value and has no setting {rest!r}")
        return dataclasses.replace(value, **{head: override(old, rest, text)})
    if dataclasses.is_dataclass(old):
        raise ValueError(f"{head!r} is a group of settings; set one of them, e.g. {head}.{dataclasses.fields(old)[0].name}")
    return dataclasses.replace(value, **{head: _read(text, old, head)})


def _read(text: str, old: Any, name: str) -> Any:
    try:
        new = json.loads(text)
    except json.JSONDecodeError:
        new = text
    if isinstance(old, str) and not isinstance(new, str):
        new = text
    if isinstance(old, tuple) and isinstance(new, list):
        new = tuple(new)
    if isinstance(old, float) and isinstance(new, int) and not isinstance(new, bool):
        new = float(new)
    if old is not None and type(new) is not type(old):
        raise ValueError(f"{name} is {old!r}, a {type(old).__name__}; {text!r} is not")
    return new


def nearest(name: str, known: list[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
