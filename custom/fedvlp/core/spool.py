"""Tensors that wait for their turn: small ones in memory, large ones in a file that has no name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedvlp.core.checkpoint import unwritten
from fedvlp.core.types import total_size

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

        ``copied``: those that stay in memory are copies, as of tensors that somebody goes on writing to.
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
    try:
        save_file({n: t.detach().contiguous() for n, t in tensors.items()}, name)
        read: Callable[[str], Tensor] = safe_open(name, framework="pt").__enter__().get_tensor
        return read
    except (OSError, SafetensorError) as error:
        raise unwritten(Path(name), error, total_size(tensors), "The checkpoint") from error
    finally:
        os.unlink(name)
