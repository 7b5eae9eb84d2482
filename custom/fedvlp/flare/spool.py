"""Updates of large models wait on the server's disk, and are read one tensor at a time.

FLARE fetches all of a reply's tensors into memory before anybody may look at it, so replies that arrive together
would need a model of memory each.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.app_opt.pt.lazy_tensor_dict import LazyTensorDict
from nvflare.app_opt.pt.tensor_downloader import download_tensors_to_disk
from nvflare.fuel.utils.memory_utils import cleanup_memory
from torch import Tensor

from fedvlp.core.types import State

M_MMAP_THRESHOLD = -3  # of glibc's mallopt
MAPPED_BYTES = 1 << 18
"""Blocks of this size and more are mapped one by one, and unmapped when they are freed."""


class SpoolingDecomposer(TensorDecomposer):
    """FLARE's decomposer of tensors, which puts what it receives into the folder ``root`` once there is one."""

    root: Path | None = None

    def spool_to(self, root: Path) -> None:
        """From now on what comes waits in ``root``, which is emptied, and what is freed goes back to the system."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        self.root = root
        return_freed_memory()

    def download(self, *args: Any, fobs_ctx: Any = None, **options: Any) -> tuple[str, dict[str, Any] | LazyTensorDict]:
        if self.root is None:
            return super().download(*args, fobs_ctx=fobs_ctx, **options)
        return download_tensors_to_disk(*args, root_dir=str(self.root), **options)


class Spooled(Mapping[str, Tensor]):
    """Named tensors, each read from disk whenever it is asked for; the files go with the last reference."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Tensor:
        value = self._values[name]
        tensor: Tensor = value.materialize() if hasattr(value, "materialize") else value
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def return_freed_memory() -> None:
    """glibc would keep freed tensors for reuse, in an arena for every thread: models of it with many sites."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    cleanup_memory()


def loaded(data: State) -> State:
    """``data`` as it is, or, where some of it is on disk, a view of the disk (not a dict, but to be read as one)."""
    on_disk = any(hasattr(value, "materialize") for value in data.values())
    return cast("State", Spooled(data)) if on_disk else data
