"""Named tensors on their way between two processes of one machine: in a file that both map, or, if few, in the pipe.

A file costs one copy, into it: the other end's tensors are views of its pages. It has no name, so that nothing stays
behind whoever is killed, and travels as an open file through the pipe. Up to ``MEMORY_BYTES`` it is in memory, beyond
in a folder on disk, where what waits for its turn takes no memory that another could need.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedvlp.core.types import LazyState, State, size_of

PIPE_BYTES = 1 << 20
"""Tensors of together fewer bytes go through the pipe."""

MEMORY_BYTES = 64_000_000
"""A file of up to so many bytes is in memory, a larger one in the spool folder, if there is one."""

ALIGNED = 64
"""Every tensor begins at a multiple of so many bytes."""


@dataclass(frozen=True)
class Shared:
    """An open file with tensors in it, and where: name, dtype, shape and first byte of each."""

    file: int
    layout: list[tuple[str, str, list[int], int]]

    def close(self) -> None:
        """Gives this process's hold on the file up; what is mapped stays."""
        os.close(self.file)


Frame = bytes | Shared
"""Tensors as they travel: safetensors bytes (none for no tensors), or a file."""


def tensor_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Safetensors bytes; none for no tensors."""
    return save({name: state[name].detach().contiguous() for name in state}) if state else b""


def frame(state: Mapping[str, Tensor], spool: Path | None = None) -> Frame:
    """``state`` as it travels. If no file can be made (no space, or no support), bytes are sent instead."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if size < PIPE_BYTES:
        return tensor_bytes(state)
    try:
        file = _unnamed(size, spool)
    except OSError:
        return tensor_bytes(state)
    try:
        return Shared(file, _fill(file, state))
    except OSError:
        os.close(file)
        return tensor_bytes(state)


def _unnamed(size: int, spool: Path | None) -> int:
    """A new file without a name, in memory or on disk."""
    if hasattr(os, "memfd_create") and (size <= MEMORY_BYTES or spool is None):
        return os.memfd_create("fedvlp")
    if spool is not None:
        spool.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=spool) as file:
        return os.dup(file.fileno())


def _fill(file: int, state: Mapping[str, Tensor]) -> list[tuple[str, str, list[int], int]]:
    """Writes the tensors one after the other; each is read where it is."""
    layout, position = [], 0
    for name in state:
        tensor = state[name].detach().contiguous()
        layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), position))
        # A write may take only a part: the rest is written where it ended.
        rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")
        while rest:
            written = os.pwrite(file, rest, position)
            rest, position = rest[written:], position + written
        position = -(-position // ALIGNED) * ALIGNED
    os.ftruncate(file, position)
    return layout


def send(connection: Connection, sent: Frame) -> None:
    """Sends a frame. Raises ConnectionError when the other end is gone."""
    if isinstance(sent, bytes):
        connection.send_bytes(b"bytes")
        connection.send_bytes(sent)
    else:
        connection.send_bytes(json.dumps(sent.layout).encode())
        send_handle(connection, sent.file, os.getpid())


def receive(connection: Connection) -> State:
    """The tensors of a frame, to be read and written; a view of a large file (not a dict, but to be read as one).

    Raises EOFError when the other end is gone.
    """
    kind = connection.recv_bytes()
    if kind == b"bytes":
        content = connection.recv_bytes()
        return load(content) if content else {}
    layout, file = json.loads(kind), recv_handle(connection)
    try:
        size = os.fstat(file).st_size
        # Private: who writes to its tensors gets pages of its own, and the file stays as it was sent.
        mapped = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)
    tensors = {name: _view(mapped, getattr(torch, dtype), shape, start) for name, dtype, shape, start in layout}
    if size <= MEMORY_BYTES:
        return tensors
    # Nobody else writes to the tensors of a file, so they need not be copied to be kept: a view says so.
    return cast("State", LazyState(tensors, tensors.__getitem__, lambda name: size_of(tensors[name])))


def _view(mapped: mmap.mmap, dtype: Any, shape: list[int], start: int) -> Tensor:
    count = math.prod(shape)
    return (
        torch.frombuffer(mapped, dtype=dtype, count=count, offset=start).reshape(shape)
        if count
        else torch.empty(shape, dtype=dtype)
    )
