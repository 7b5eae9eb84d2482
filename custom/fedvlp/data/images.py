"""Decoding the image files of a data set, through the cache: what all sources of files share."""

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
    """The image in ``file`` as uint8 [size, size], or the reason why it cannot be read."""
    try:
        return load(file, decode(size))
    except UnreadableImageError as error:
        return error.reason


def films(
    source: str, ids: Sequence[str], files: Sequence[Path], size: int, cache: str | None, building: Building
) -> ImageCache:
    """Reader of the images in ``files`` at ``size`` x ``size`` pixels; ``ids`` name them, wherever the files are.

    The key of a cache on disk is made of ``source``, the ids, each file's length and time of change, the image size and
    the version of decoding. So a cache is used again after the folder of the images has moved, and built again after a
    file has changed. ``cache`` None decodes in memory at first use. Errors are those of ``cached_images``.
    """
    stats = [file.stat() for file in files] if cache else []
    state = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in zip(ids, stats, strict=False)]
    key = f"{source}-" + digest(DECODING, str(size), *state)[:32]
    folder = Path(cache) if cache else None
    return cached_images(folder, key, files, partial(film, size=size), size, building)
