"""Decoding the image files of a data set, through the cache: what all sources of files share."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fedvlp.data.burned_in import ACCEPT, REASON, SEARCH, UNSEARCHED, VERSION, can_search, check_choice, holds_text
from fedvlp.data.cache import ImageCache, cached_images
from fedvlp.data.cache_format import Building, shape_of
from fedvlp.data.cohort import digest
from fedvlp.data.radiograph import ImageAccessError, UnreadableImageError, decoders, read_radiograph
from fedvlp.data.transforms import DECODING, decode_stored

log = logging.getLogger(__name__)

PLAIN = (".png", ".jpg", ".jpeg", ".tif", ".tiff")
"""Suffixes of files that need no decoder but Pillow."""

LARGE = 2 * 2**30
"""Bytes of decoded images above which a source without a cache warns: every process would hold them in memory."""


def film(file: Path, size: int, burned_in: str, colour: bool = False) -> tuple[np.ndarray, str] | str:
    """The image in ``file`` as uint8 [size, size], in ``colour`` [size, size, 3], and how it is stored there.

    Or why it cannot be used.

    ``burned_in`` is one of ``burned_in.CHOICES``; "search" looks at the pixels if the extra that can is installed.
    Raises ImageAccessError where the reason lies not in the file: a cache keeps the reasons.
    """
    try:
        image = decode_stored(file, size, burned_in == ACCEPT, colour)
        if burned_in == SEARCH and can_search() and holds_text(read_radiograph(file)):
            return REASON
        return image
    except UnreadableImageError as error:
        if error.reason == "missing image":  # it was there when it was listed
            raise ImageAccessError(
                "an image has gone since the data set was listed; see that its disk or share is there, and run again"
            ) from None
        return error.reason


def films(
    source: str,
    ids: Sequence[str],
    files: Sequence[Path],
    size: int,
    cache: str | None,
    building: Building,
    burned_in: str,
    colour: bool = False,
) -> ImageCache:
    """Reader of the images in ``files`` at ``size`` x ``size`` pixels; ``ids`` name them, wherever the files are.

    The key of a cache on disk is made of ``source``, the ids, each file's length and time of change, the image size,
    the version of decoding, ``colour``, whether films are searched for ``burned_in`` text, and, unless all files are
    ``PLAIN``, the decoders that are installed. So a cache is used again after the folder of the images has moved, and
    built again after a file has changed, or after a decoder was installed that films were left out for. ``cache`` None
    decodes in memory at first use. Errors are those of ``cached_images`` and ``film``.
    """
    check_choice(burned_in)
    shape = shape_of(size, colour)
    needed = len(files) * math.prod(shape)
    if not cache and needed > LARGE:
        log.warning(
            "%s source: %d images are decoded into %.1f GB of memory, at every start; give a cache (--cache FOLDER, or "
            "cache in the source's settings) to decode them once, to disk",
            source,
            len(files),
            needed / 1e9,
        )
    stats = [file.stat() for file in files] if cache else []
    state = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in zip(ids, stats, strict=False)]
    looked = {SEARCH: [VERSION] if can_search() else [], ACCEPT: [ACCEPT]}.get(burned_in, [])
    looked += ["colour"] if colour else []
    looked += [] if all(file.suffix.lower() in PLAIN for file in files) else decoders()
    key = f"{source}-" + digest(DECODING, *looked, str(size), *state)[:32]
    folder = Path(cache) if cache else None
    reading = partial(film, size=size, burned_in=burned_in, colour=colour)
    return cached_images(folder, key, files, reading, shape, building)


def unsearched(burned_in: str, count: int, source: str) -> dict[str, int]:
    """For a summary: how many of ``count`` films came in without anybody having looked for text in their pixels.

    Warns where that is for want of the extra.
    """
    if burned_in == SEARCH and can_search():
        return {}
    if burned_in == SEARCH:
        log.warning("%s source: %d %s; pip install 'fedvlp[ocr]' lets them be searched", source, count, UNSEARCHED)
    return {UNSEARCHED: count}
