"""What the reader and the builder of an image cache share: format, array files, settings of a build."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "fedvlp-image-cache-2"
SHARD_BYTES = 2**30  # of pixels in one array file, at most
Decode = Callable[[Any], "np.ndarray | str"]
"""Decodes one item to uint8 [S, S], or to the reason (a str) why it cannot. Picklable: other processes call it too."""


@dataclass(frozen=True)
class Building:
    """How a cache is built."""

    workers: int = 1  # processes that decode
    progress: Callable[[int, int], None] | None = None  # called with (rows ready, rows in all) after every chunk


SERIAL = Building()


class Shards:
    """The array files of a cache: ``n`` images of ``size`` x ``size`` pixels, ``per`` in each file but the last."""

    def __init__(self, folder: Path, n: int, size: int, per: int) -> None:
        """Raises OSError or ValueError where a file is not uint8 [rows in it, size, size]."""
        self._size, self._per = size, per
        self._files, self._offsets = [], []
        for number, first in enumerate(range(0, n, per)):
            file = folder / f"images-{number:05d}.npy"
            images = np.load(file, mmap_mode="r", allow_pickle=False)
            shape = (min(per, n - first), size, size)
            if images.shape != shape or images.dtype != np.uint8 or not images.flags.c_contiguous:
                raise ValueError(f"images are {images.dtype} {list(images.shape)}, expected uint8 {list(shape)}")
            self._files.append(file.open("rb", buffering=0))
            self._offsets.append(images.offset)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S] of rows [n]. Raises OSError where a file has become shorter.

        Rows are read with one system call each, in the order of the file: page faults of a memory map cost more.
        """
        out = np.empty((len(rows), self._size, self._size), dtype=np.uint8)
        length = self._size * self._size
        for index in np.argsort(rows, kind="stable").tolist():
            shard, within = divmod(int(rows[index]), self._per)
            start = self._offsets[shard] + within * length
            if os.preadv(self._files[shard].fileno(), [out[index]], start) != length:
                raise OSError("an array file has become shorter")
        return out
