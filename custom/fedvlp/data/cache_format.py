"""What the reader and the builder of an image cache share: format, array files, settings of a build."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "fedvlp-image-cache-2"
SHARD_BYTES = 2**30  # of pixels in one array file, at most
Decode = Callable[[Any], "tuple[np.ndarray, str] | np.ndarray | str"]
"""Decodes one item to uint8 [S, S] or [S, S, 3], alone or with how its file stores it; or to the reason why it cannot.

Picklable: other processes call it too.
"""


@dataclass(frozen=True)
class Building:
    """How a cache is built."""

    workers: int = 1  # processes that decode
    progress: Callable[[int, int], None] | None = None  # called with (rows ready, rows in all) after every chunk


SERIAL = Building()


def shape_of(size: int, colour: bool = False) -> tuple[int, ...]:
    """The shape of one image: [size, size] in grey, [size, size, 3] in colour."""
    return (size, size, 3) if colour else (size, size)


class Shards:
    """The array files of a cache: ``n`` images of one ``shape``, ``per`` in each file but the last."""

    def __init__(self, folder: Path, n: int, shape: tuple[int, ...], per: int) -> None:
        """Raises OSError or ValueError where a file is not uint8 [rows in it, *shape]."""
        self._shape, self._per = shape, per
        self._files, self._offsets = [], []
        for number, first in enumerate(range(0, n, per)):
            file = folder / f"images-{number:05d}.npy"
            images = np.load(file, mmap_mode="r", allow_pickle=False)
            expected = (min(per, n - first), *shape)
            if images.shape != expected or images.dtype != np.uint8 or not images.flags.c_contiguous:
                raise ValueError(f"images are {images.dtype} {list(images.shape)}, expected uint8 {list(expected)}")
            self._files.append(file.open("rb", buffering=0))
            self._offsets.append(images.offset)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, *shape] of rows [n]. Raises OSError where a file has become shorter.

        Rows are read with one system call each, in the order of the file: page faults of a memory map cost more.
        """
        out = np.empty((len(rows), *self._shape), dtype=np.uint8)
        length = math.prod(self._shape)
        for index in np.argsort(rows, kind="stable").tolist():
            shard, within = divmod(int(rows[index]), self._per)
            start = self._offsets[shard] + within * length
            if os.preadv(self._files[shard].fileno(), [out[index]], start) != length:
                raise OSError("an array file has become shorter")
        return out
