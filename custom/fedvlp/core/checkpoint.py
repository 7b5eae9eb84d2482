"""Files that survive a kill: named tensors with a JSON header (safetensors).

Written to a temporary name, synced, renamed: a file is either the old one or the new one, whole. Nothing is ever
unpickled. Every tensor and the header have a checksum in the file, so that a bit that a disk lost is noticed. It is
CRC-32, a third of a second of a processor per GB, and no protection against deliberate changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedvlp.core.disk import free_space, is_full
from fedvlp.core.json_file import refuse_special
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import State

HEADER = "fedvlp"
"""The only entry of a safetensors file's metadata, whose order is not the same in every process. Its first line has the
checksums by tensor, that of the second line under ""; the second is the header. Both are JSON."""

SUMS = "crc32"
"""Entry of a header: checksums of other files."""


class CheckpointError(SiteError, RuntimeError):
    """A checkpoint cannot be written or read; the message says which file, why, and what to do."""

    full = False  # whether the disk was full


def replace_durably(temporary: Path, path: Path) -> None:
    """Syncs ``temporary`` to disk and renames it to ``path``; the directory entry is synced too."""
    with open(temporary, "rb+") as handle:
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _make_room(path: Path, private: bool = False) -> None:
    """Creates the folder, with ``private`` for its owner alone; deletes temporary files of killed writers."""
    path.parent.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        _discard(left)


def _discard(temporary: Path) -> None:
    """Removes what a failed write left, if it is there at all."""
    with contextlib.suppress(OSError):
        temporary.unlink()


@contextlib.contextmanager
def _discarded(temporary: Path) -> Iterator[None]:
    """Around a write: what it leaves when it fails is removed before anybody asks how much space is free."""
    try:
        yield
    finally:
        _discard(temporary)


def unwritten(path: Path, error: Exception, size: int, intact: str = "") -> CheckpointError:
    """What to raise when ``error`` kept ``size`` bytes from being written as ``path``; ``intact`` is still whole.

    ``intact``: by default the file that ``path`` was before, if there was one.
    """
    full = is_full(error)
    why = "the disk is full" if full else getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    needs = f"it needs {size:,} bytes there" + (f": {free_space(path.parent, size)}" if full else "")
    intact = intact or ("The previous file" if path.exists() else "What was there")
    failure = CheckpointError(
        f"cannot write {path.name} in {path.parent}: {why}; {needs}. "
        f"{intact} is intact: free space (or make the folder writable), then resume the run, or, where there is none, "
        "start again.",
        public="cannot write a file of the run: the disk is full; it needs {size:,} bytes"
        if full
        else "cannot write a file of the run",
        size=size,
    )
    failure.full = full
    return failure


@contextlib.contextmanager
def writing(path: Path, size: int, intact: str = "") -> Iterator[None]:
    """Around what writes ``size`` bytes as ``path``. Raises CheckpointError, as ``unwritten`` words it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise unwritten(path, error, size, intact) from error


def save_tensors(path: Path, tensors: State, header: dict[str, Any] | None = None) -> None:
    """Writes ``tensors`` and a JSON ``header`` atomically. Raises CheckpointError, the old file untouched."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    with writing(path, size), _discarded(temporary):
        _make_room(path)
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        text = json.dumps(header or {})
        sums = {"": zlib.crc32(text.encode())} | {name: checksum(name, tensor) for name, tensor in contiguous.items()}
        save_file(contiguous, temporary, metadata={HEADER: f"{json.dumps(sums, sort_keys=True)}\n{text}"})
        replace_durably(temporary, path)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what :func:`save_tensors` wrote: tensors and header. Raises CheckpointError naming a damaged file."""
    return _load(path, with_tensors=True)


def load_header(path: Path) -> dict[str, Any]:
    """The JSON header of a file that :func:`save_tensors` wrote, without its tensors. Raises as ``load_tensors``."""
    return _load(path, with_tensors=False)[1]


def _load(path: Path, with_tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        refuse_special(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.keys() - {HEADER, "format"}:
                raise ValueError("its metadata are of no known kind")
            # A file of another writer has neither checksums nor header: a model's has those of its folder.
            first, _, text = metadata.get(HEADER, "null\n{}").partition("\n")
            sums = json.loads(first)
            if sums is not None and sums[""] != zlib.crc32(text.encode()):
                raise ValueError("the header is not as it was written")
            tensors = {name: file.get_tensor(name) for name in file.keys()} if with_tensors else {}  # noqa: SIM118
            for name, tensor in tensors.items():
                if sums is not None and sums[name] != checksum(name, tensor):
                    raise ValueError(f"the tensor {name} is not as it was written")
            return tensors, json.loads(text)
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise unread(path, error) from error


def checksum(name: str, tensor: Tensor) -> int:
    """CRC-32 of a tensor, of its name, type and shape too: a header that a flipped bit changed is another tensor's."""
    described = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, described)


def unread(path: Path, error: Exception) -> CheckpointError:
    """What to raise when ``error`` kept ``path`` from being read."""
    return CheckpointError(
        f"cannot read {path.name} in {path.parent}: {type(error).__name__}: {error}. "
        "It is damaged or not a fedvlp file; restore it from a copy, or remove it to start that part again.",
        public="a file of the run is damaged, or gone",
    )


def save_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically."""
    save_text(path, json.dumps(value, indent=2) + "\n")


def save_text(path: Path, text: str) -> None:
    """Writes ``text`` in UTF-8 atomically. Raises CheckpointError."""
    save_bytes(path, text.encode())


def save_bytes(path: Path, content: bytes, private: bool = False) -> None:
    """Writes ``content`` atomically, for its owner alone if it is ``private``. Raises CheckpointError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path, len(content)), _discarded(temporary):
        _make_room(path, private)
        if private:
            temporary.touch(mode=0o600)
        temporary.write_bytes(content)
        replace_durably(temporary, path)
