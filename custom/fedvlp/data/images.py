"""The radiographs of a data set, decoded: what every source of image files has in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fedvlp.data.cache import ImageCache, cached_images
from fedvlp.data.cache_format import Building
from fedvlp.data.cohort import digest
from fedvlp.data.radiograph import UnreadableImageError
from fedvlp.data.transforms import DECODING, decode, load


def film(file: Path, size: int) -> np.ndarray | str:
    """uint8 [size, size] of one file, or the reason why there is none."""
    try:
        return load(file, decode(size))
    except UnreadableImageError as error:
        return error.reason


def films(
    source: str, ids: Sequence[str], files: Sequence[Path], size: int, cache: str | None, building: Building
) -> ImageCache:
    """Reader of the files' images; ``ids`` name them whatever their place on this disk.

    A cache on disk belongs to these ids, the size and time of each file, the image size and the way of decoding: it is
    found again after the folder has moved, and built again after a file has changed.
    """
    stats = [file.stat() for file in files] if cache else []
    state = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in zip(ids, stats, strict=False)]
    key = f"{source}-" + digest(DECODING, str(size), *state)[:32]
    folder = Path(cache) if cache else None
    return cached_images(folder, key, files, partial(film, size=size), size, building)
