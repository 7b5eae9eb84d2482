"""Tensors of a safetensors file, read and written in place and piece by piece: none of them stays in memory."""

from __future__ import annotations

import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedvlp.core.checkpoint import unread, writing
from fedvlp.core.json_file import refuse_special
from fedvlp.core.types import LazyState, total_size

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Of the words of a safetensors header."""

PIECE = 1 << 15
"""Values of a tensor that :meth:`TensorFile.pieces` names at a time."""


class TensorFile(LazyState):
    """A file that :func:`write_tensors` or ``save_file`` wrote. It is opened for each access and never left open."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a file that is missing, damaged or of another kind."""
        try:
            refuse_special(path)
            with open(path, "rb") as file:
                size, end = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
                header = json.loads(file.read(min(size, end)))
            header.pop("__metadata__", None)
            self._start = {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}
            self._shape = {name: tuple(entry["shape"]) for name, entry in header.items()}
            self._dtype = {name: DTYPES[entry["dtype"]] for name, entry in header.items()}
            if end != 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0):
                raise ValueError(f"its length is {end} bytes, which is not the length that its tensors need")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise unread(path, error) from error
        super().__init__(header)
        self.path = path

    def __getitem__(self, name: str) -> Tensor:
        """A copy of the whole tensor."""
        return self.read(name, 0, self.numel(name)).reshape(self._shape[name])

    def numel(self, name: str) -> int:
        """How many values the tensor has."""
        return math.prod(self._shape[name])

    def pieces(self, name: str) -> Iterator[tuple[int, int]]:
        """(start, stop) of the tensor's values, ``PIECE`` at a time."""
        count = self.numel(name)
        return ((start, min(start + PIECE, count)) for start in range(0, count, PIECE))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of some of the tensor's values, [stop - start]. Raises CheckpointError."""
        values = torch.empty(stop - start, dtype=self._dtype[name])
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self._start[name] + start * values.element_size())
                target = memoryview(values.view(torch.uint8).numpy().data)
                while target:
                    count = file.readinto(target)
                    if not count:
                        raise OSError(f"{len(target)} bytes of {name} are missing")
                    target = target[count:]
        except OSError as error:
            raise unread(self.path, error) from error
        return values

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Replaces the tensor's values from ``start`` on by those of ``values``. Raises CheckpointError."""
        flat = values.detach().contiguous().reshape(-1)
        if not flat.numel():
            return
        size = flat.numel() * flat.element_size()
        with writing(self.path, size, "The checkpoint"), open(self.path, "r+b", buffering=0) as file:
            file.seek(self._start[name] + start * flat.element_size())
            source = memoryview(flat.view(torch.uint8).numpy().data)
            while source:
                source = source[file.write(source) :]

    def checksum(self) -> int:
        """CRC-32 of the whole file."""
        sum = 0
        with open(self.path, "rb") as file:
            while piece := file.read(1 << 20):
                sum = zlib.crc32(piece, sum)
        return sum

    def sync(self) -> None:
        """Everything that was written is on the disk when this returns."""
        with open(self.path, "rb+") as file:
            os.fsync(file.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> TensorFile:
    """Writes tensors to a new file or over an old one, neither atomically nor synced. Raises CheckpointError."""
    state = {name: tensors[name].detach().contiguous() for name in tensors}
    with writing(path, total_size(state), "The checkpoint"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(state, path)
        except (OSError, SafetensorError):
            path.unlink(missing_ok=True)
            raise
    return TensorFile(path)


# Tensors that wait for their turn: small ones in memory, large ones in a file that has no name.

PARK_BYTES = 64_000_000
"""Tensors that wait are in memory below this size together, from it on they are on disk."""


@dataclass(frozen=True)
class Spool:
    """Where the tensors of a run wait.

    Args:
        folder: of the files; None keeps everything in memory.
    """

    folder: Path | None = None

    def put(self, tensors: Mapping[str, Tensor], *, copied: bool = True) -> Callable[[str], Tensor]:
        """Sets tensors aside; the result gives one of them, from disk as a map of the file. Raises CheckpointError.

        ``copied``: those that stay in memory are copies, for tensors that are still being written.
        """
        if self.folder is not None and total_size(tensors) >= PARK_BYTES:
            return _on_disk(tensors, self.folder)
        return {name: tensor.clone() if copied else tensor for name, tensor in tensors.items()}.__getitem__


def _on_disk(tensors: Mapping[str, Tensor], folder: Path) -> Callable[[str], Tensor]:
    """Writes tensors into a file of ``folder``; the result maps one of them.

    The file has no name any more when this returns: what is open stays readable, and a run that ends, however that
    comes, leaves nothing behind. Files with a name are of writers that were killed, since a run has one writer at a
    time; they are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.safetensors"):
        left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, suffix=".safetensors")
    os.close(handle)
    with writing(Path(name), total_size(tensors), "The checkpoint"):
        try:
            save_file({n: t.detach().contiguous() for n, t in tensors.items()}, name)
            read: Callable[[str], Tensor] = safe_open(name, framework="pt").__enter__().get_tensor
        finally:
            os.unlink(name)
    return read
