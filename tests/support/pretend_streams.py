"""Streams, events and copies of the pretended device.

What was queued on which stream, in order, and for what the host would have waited on a real GPU. ``QUEUED`` has it
all; whoever is in ``OBSERVERS`` is told of each entry as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils.backend_registration import _DummyBackendModule

COPIES = ("aten::copy_", "aten::_to_copy")
WAITING = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive",
)  # fmt: skip
"""Operations whose result, or its shape, the host has to know."""


@dataclass(frozen=True)
class Entry:
    """``copy`` (from the CPU), ``fetch`` (to it), ``record``, ``wait`` (for an event), ``sync`` or ``mark``."""

    kind: str
    stream: int  # 0: the one of the steps
    name: str = ""  # of the operation, or of what is marked
    bytes: int = 0
    dtype: str = ""
    pinned: bool = False
    waits: bool = False  # whether the host waits for it
    event: int = 0


QUEUED: list[Entry] = []
OBSERVERS: list[Callable[[Entry], None]] = []
_events = count(1)
_streams = count(0)


def queue(kind: str, **details: Any) -> None:
    """Adds an entry, on the current stream unless another is named."""
    entry = Entry(kind, **{"stream": _current[-1].number, **details})
    QUEUED.append(entry)
    for observer in OBSERVERS:
        observer(entry)


def mark(name: str) -> None:
    """Notes what the host does now."""
    queue("mark", name=name)


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self.number = next(_events)

    def synchronize(self) -> None:
        queue("sync", name="event", waits=True, event=self.number)


class Stream:
    """What torch.cuda.Stream is to CUDA, as far as fedvlp uses it."""

    def __init__(self, device: Any = None) -> None:
        self.number = next(_streams)

    def record_event(self) -> Event:
        event = Event()
        queue("record", stream=self.number, event=event.number)
        return event

    def wait_event(self, event: Event) -> None:
        queue("wait", stream=self.number, event=event.number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        queue("sync", stream=self.number, name="stream", waits=True)


_current = [Stream()]


class Backend(_DummyBackendModule):
    """``torch.pretend``."""

    Stream, Event = Stream, Event

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: Any = None) -> Stream:
        return _current[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        _current.append(stream)
        try:
            yield
        finally:
            _current.pop()

    def synchronize(self, device: Any = None) -> None:
        queue("sync", name="device", waits=True)


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is marked as pinned."""
    copy: Any = tensor.clone()
    copy.is_pinned_here = True
    return copy


def observe(name: str, args: Any, options: Any, here: Callable[[Any], bool]) -> None:
    """Notes what an operation copies or makes the host wait for. ``here``: whether a value is on the device."""
    if name in COPIES:
        source = args[1] if name == "aten::copy_" else args[0]
        late = options.get("non_blocking", len(args) > 2 and args[2]) is True
        to = here(args[0]) if name == "aten::copy_" else options.get("device", torch.device("meta")).type != "cpu"
        of = {"name": name, "bytes": source.numel() * source.element_size(), "dtype": str(source.dtype)}
        if not here(source) and to:
            pinned = getattr(source, "is_pinned_here", False)
            queue("copy", pinned=pinned, waits=not (late and pinned), **of)
        elif here(source) and not (here(args[0]) if name == "aten::copy_" else options.get("device") is None or to):
            queue("fetch", waits=not late, **of)
    elif name in WAITING and any(here(value) for value in args):
        queue("sync", name=name, waits=True)
    elif name in ("aten::index.Tensor", "aten::_index_put_impl_") and here(args[0]):
        indices = [one for one in args[1] if isinstance(one, torch.Tensor)]
        if any(one.dtype == torch.bool or not here(one) for one in indices):
            queue("sync", name=name, waits=True)
