"""Every channel and topic for which FLARE's own source registers a handler, read from the installed package."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nvflare
from nvflare.apis.fl_constant import ReservedTopic, ServerCommandNames
from nvflare.private.defs import ControlCommandTopic, InfoCollectorTopic, SysCommandTopic, TrainingTopic
from nvflare.private.stream_runner import TOPIC_STREAM_ABORT, TOPIC_STREAM_REQUEST
from nvflare.widgets.fed_event import FED_EVENT_TOPIC

REGISTER = frozenset({"register_request_cb", "register_stream_cb", "register_blob_cb", "register_objects_cb"})
NAMED = (ReservedTopic, ServerCommandNames, TrainingTopic, SysCommandTopic, InfoCollectorTopic, ControlCommandTopic)
ANY = "anything"
"""A topic that FLARE has no name for."""


def topics() -> set[str]:
    """What a handler of all topics of a channel may be sent."""
    named = {topic for group in NAMED for name, topic in vars(group).items() if name.isupper()}
    return {topic for topic in named if isinstance(topic, str)} | {
        TOPIC_STREAM_ABORT,
        TOPIC_STREAM_REQUEST,
        FED_EVENT_TOPIC,
        ANY,
    }


def _registrations(file: Path, module: str) -> Iterator[tuple[Any, Any]]:
    """Channel and topic of each registration in a file; None for what only a running process knows."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REGISTER:
            given = dict(zip(("channel", "topic"), node.args, strict=False))
            given |= {word.arg: word.value for word in node.keywords if word.arg}
            scope = vars(importlib.import_module(module))
            yield tuple(_value(given[name], scope) for name in ("channel", "topic"))  # type: ignore[misc]


def _value(node: ast.expr, scope: dict[str, Any]) -> Any:
    try:
        return eval(compile(ast.Expression(node), "<FLARE>", "eval"), scope)  # names of constants
    except NameError:
        return None


@cache
def registered() -> frozenset[tuple[str, str]]:
    """Channel and topic; a handler of all topics is there with each that has a name, and with one that has none."""
    root = Path(nvflare.__file__).parent
    found = set()
    for file in root.rglob("*.py"):
        if any(name in file.read_text(encoding="utf-8") for name in REGISTER):
            module = ".".join(["nvflare", *file.relative_to(root).with_suffix("").parts])
            found |= set(_registrations(file, module))
    pairs = {(channel, topic) for channel, topic in found if channel and topic}
    return frozenset(pair for channel, topic in pairs for pair in ((channel, t) for t in _each(topic)))


def _each(topic: str) -> set[str]:
    return topics() if topic == "*" else {topic}
