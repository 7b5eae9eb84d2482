"""Image files of a data set, by the names that its table has for them, to uint8 squares, through the cache.

Chest images are grey, [S, S]. Photographs may be in colour, [S, S, 3]: red, green and blue.
"""

from __future__ import annotations

import logging
import math
import os
import unicodedata
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, filterfalse
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.data.burned_in import ACCEPT, REASON, SEARCH, UNSEARCHED, VERSION, can_search, check_choice, holds_text
from fedvlp.data.cache import ImageCache, cached_images
from fedvlp.data.cache_build import Building, shape_of
from fedvlp.data.cohort import digest
from fedvlp.data.radiograph import ImageAccessError, UnreadableImageError, decoders, read_radiograph, read_stored
from fedvlp.data.report_text import is_missing

if TYPE_CHECKING:
    from monai.transforms import Compose

# Finds image files by the names that a table has for them.

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".dcm", ".dicom")
"""Those of image files that a name may lack."""

BESIDE = ("__MACOSX", "System Volume Information", "lost+found", "Thumbs.db", "desktop.ini", "RECYCLER")
"""What systems lay beside the files of a folder, with names of no special first letter."""

NO_NAME, OUTSIDE, MISSING = "no image name", "image outside the root", "missing image"
SEVERAL = "several images of this name, but for case or suffix"


def is_beside(path: Path) -> bool:
    """Whether a Mac, a NAS or a recycle bin has put a file or folder of this name beside those of a data set."""
    return path.name.startswith((".", "@", "#", "$", "~")) or path.name in BESIDE


def files_below(root: Path, pattern: str = "*") -> list[Path]:
    """The files below ``root`` whose name fits the ``pattern``, sorted, without those that nobody put there."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not is_beside(Path(name))]
        files += [Path(folder, name) for name in names if not is_beside(Path(name)) and fnmatchcase(name, pattern)]
    return sorted(files)


class ImageNames:
    """The files below ``root`` by name, whatever the case and the form of accents, with or without a suffix.

    Windows takes any case, and a Mac writes "ö" as two characters: names of a table made there differ from the files'.
    """

    def __init__(self, root: Path, suffix: str = "") -> None:
        """``suffix``: "png" or ".png", of the files whose names lack one; "": any of ``SUFFIXES``."""
        self.root = root
        self._suffix = suffix and f".{suffix.lstrip('.')}"
        self._listings: dict[Path, dict[str, list[str]]] = {}

    def find(self, name: str) -> tuple[Path | None, str]:
        """The image file ``name``, or None and the reason. Both "/" and "\\" separate folders.

        A file of exactly this name is preferred; else it has to be the only one.
        """
        if is_missing(name):
            return None, NO_NAME
        relative = PureWindowsPath(name if name.lower().endswith(self._suffix.lower()) else name + self._suffix)
        if relative.anchor or ".." in relative.parts:
            return None, OUTSIDE
        try:
            file = self.root.joinpath(*relative.parts).resolve()
            exact = file.is_file() or not file.is_relative_to(self.root)
            files = [file] if exact else self._alike(relative.parts)
        except (OSError, ValueError, RuntimeError):  # name too long, null byte, loop of links
            files = []
        if len(files) != 1:
            return None, SEVERAL if files else MISSING
        return (files[0], "") if files[0].is_relative_to(self.root) else (None, OUTSIDE)

    def _alike(self, names: tuple[str, ...]) -> list[Path]:
        """The files whose path is ``names`` but for case, form of accents, and a suffix."""
        paths = [self.root]
        for name in names:
            paths = [path / known for path in paths for known in self._named(path, name)]
        return list({path.resolve(): None for path in paths if path.is_file()})

    def _named(self, folder: Path, name: str) -> list[str]:
        """What ``folder`` holds by this name; if nothing, by that of an image, as of images that were converted."""
        listing, path = self._listing(folder), Path(name)
        bare = path.stem if path.suffix.lower() in SUFFIXES else name
        return listing.get(_folded(name)) or [
            known for known in listing.get(_folded(bare), ()) if Path(known).suffix.lower() in SUFFIXES
        ]

    def _listing(self, folder: Path) -> dict[str, list[str]]:
        """What ``folder`` holds: folded name, of images also without suffix -> names. It is read once."""
        if folder not in self._listings:
            names: dict[str, list[str]] = {}
            for path in filterfalse(is_beside, folder.iterdir() if folder.is_dir() else ()):
                bare = [path.stem] if path.suffix.lower() in SUFFIXES else []
                for known in chain([path.name], bare):
                    names.setdefault(_folded(known), []).append(path.name)
            self._listings[folder] = names
        return self._listings[folder]


def _folded(name: str) -> str:
    """``name`` in one case, with each accent and its letter as one character."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


log = logging.getLogger(__name__)

PLAIN = (".png", ".jpg", ".jpeg", ".tif", ".tiff")
"""Suffixes of files that need no decoder but Pillow."""

SMALLEST = 8
"""Pixels of the side of a decoded square, at least."""

LARGE = 2 * 2**30
"""Bytes of decoded images above which a source without a cache warns: every process would hold them in memory."""


DECODING = "radiograph-7"  # names what decode() does to a file; change it with the result, so that caches rebuild


def decode(path: Path, image_size: int, burned_in: bool = False, colour: bool = False) -> np.ndarray:
    """The image in a file as uint8 [S, S], in ``colour`` [S, S, 3], S = ``image_size``.

    ``burned_in`` and ``colour`` are those of ``read_radiograph``. The longer side is resized to S by area, the shorter
    side zero-padded on both sides. Raises UnreadableImageError, which quotes nothing of the file, and ValueError for an
    ``image_size`` below 8.
    """
    return decode_stored(path, image_size, burned_in, colour)[0]


def decode_stored(path: Path, image_size: int, burned_in: bool = False, colour: bool = False) -> tuple[np.ndarray, str]:
    """``decode``, and how the file stores the image (``radiograph.read_stored``)."""
    if image_size < SMALLEST:
        raise ValueError(f"decode: image_size must be at least {SMALLEST} pixels, got {image_size}")
    image, stored = read_stored(path, image_size, burned_in, colour)
    return square(image, image_size), stored


def decoding(image_size: int, burned_in: bool = False, colour: bool = False) -> Compose:
    """``decode`` as the first transform of a MONAI pipeline: from a path to what it returns.

    MONAI wraps every error of a transform in RuntimeError. Its own loader is not used, since it carries a file's
    metadata along; nor is MONAI imported for decoding alone, which would take longer than many a command.
    """
    from monai.transforms import Compose

    return Compose([lambda path: decode(Path(path), image_size, burned_in, colour)])


def square(image: np.ndarray, image_size: int) -> np.ndarray:
    """[h, w] in 0..255, neither side above S = ``image_size``, to uint8 [S, S]: zeros on both sides of it.

    An image [h, w, 3] becomes [S, S, 3]. Raises UnreadableImageError for a constant image.
    """
    film = torch.from_numpy(image)[None] if image.ndim == 2 else torch.from_numpy(image).permute(2, 0, 1)  # [C, h, w]
    spare = [image_size - side for side in film.shape[:0:-1]]  # of width, then of height
    return to_uint8(F.pad(film, [zeros for one in spare for zeros in (one // 2, one - one // 2)]))


def to_uint8(image: Tensor) -> np.ndarray:
    """Float [1, S, S] in 0..255 to uint8 [S, S], [3, S, S] to [S, S, 3], rounded.

    Raises UnreadableImageError for a constant image.
    """
    planes = image.round().clamp(0, 255).to(torch.uint8)
    pixels = planes[0].numpy() if len(planes) == 1 else planes.permute(1, 2, 0).contiguous().numpy()
    if pixels.max() == pixels.min():
        raise UnreadableImageError("constant image")
    return pixels


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
    except (ImageAccessError, OSError, ImportError, MemoryError):
        raise  # of the machine: other images would fail alike
    except Exception as error:  # a file that no reader has foreseen costs its row, and no other
        return f"an image that cannot be decoded ({type(error).__name__})"


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
    the version of decoding, ``colour``, whether images are searched for ``burned_in`` text, and, unless all files are
    ``PLAIN``, the decoders that are installed. So a cache is used again after the folder of the images has moved, and
    built again after a file has changed, or after a decoder was installed that images were left out for. ``cache`` None
    decodes in memory at first use. Errors are those of ``cached_images`` and ``film``.
    """
    check_choice(burned_in)
    if size < SMALLEST:
        raise ValueError(f"{source} source: image_size must be at least {SMALLEST} pixels, got {size}")
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
    """For a summary: how many of ``count`` images came in without anybody having looked for text in their pixels.

    Warns where that is for want of the extra.
    """
    if burned_in == SEARCH and can_search():
        return {}
    if burned_in == SEARCH:
        log.warning("%s source: %d %s; pip install 'fedvlp[ocr]' lets them be searched", source, count, UNSEARCHED)
    return {UNSEARCHED: count}
