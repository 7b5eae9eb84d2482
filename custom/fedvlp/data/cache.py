"""Decoded images kept as one array file: built once, shared by every process of a site, never believed unchecked.

A cache is the folder ``<key>`` holding ``images.npy`` (uint8 [N, S, S], no pickle) and ``index.json`` (shape, skipped
rows and a CRC-32 per row). It is written under a temporary name and renamed whole, so a reader sees all of it or none;
each row's CRC is compared whenever the row is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

FORMAT = "fedvlp-image-cache-1"
_NO_IMAGES = np.zeros((0, 0, 0), dtype=np.uint8)
Build = Callable[[], Iterator[np.ndarray | str]]
"""Yields, row by row, uint8 [S, S], or the reason (a str) why the row has no readable image."""


class ImageCache:
    """Reader of decoded images: rows [n] to uint8 [n, S, S], a copy. Skipped rows read as zeros."""

    def __init__(self, key: str, open_: Callable[[], tuple[np.ndarray, np.ndarray, dict[int, str]]]) -> None:
        self._key = key
        self._open = open_
        self._content: tuple[np.ndarray, np.ndarray, dict[int, str]] | None = None

    def _parts(self) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
        if self._content is None:
            self._content = self._open()
        return self._content

    @property
    def skipped(self) -> dict[int, str]:
        """Reason by row for the rows that have no readable image."""
        return dict(self._parts()[2])

    @property
    def checksums(self) -> np.ndarray:
        """CRC-32 of each row's pixels [N] uint32: the content, whichever machine decoded it."""
        return self._parts()[1]

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        images, checksums, _ = self._parts()
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(images)):
            raise IndexError(f"image cache {self._key!r}: rows must be in 0..{len(images) - 1}")
        chosen = np.ascontiguousarray(images[rows])  # a copy
        damaged = sum(zlib.crc32(image.data) != checksums[row] for image, row in zip(chosen, rows, strict=True))
        if damaged:
            raise _refusal(self._key, f"{damaged} of {len(rows)} images do not match their checksum")
        return chosen


def cached_images(folder: Path | None, key: str, build: Build, n: int, size: int) -> ImageCache:
    """Reader of the ``n`` images of side ``size`` that ``build`` yields.

    With a folder they are built now, or reused if the cache of this ``key`` is there; the caller puts into the key all
    that determines the pixels (files, transform). Without one they are decoded at first use and stay in memory.
    Raises ValueError for a cache that is damaged or not this one; ``build``'s own errors pass through, leaving nothing.
    """
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,80}", key):
        raise ValueError("image cache: a key is 1 to 80 letters, digits, - and _")
    if folder is None:
        return ImageCache(key, lambda: _decode(build, n, size))
    target = Path(folder) / key
    if not target.exists():
        Path(folder).mkdir(parents=True, exist_ok=True)
        with _lock(Path(folder) / f".{key}.lock") as alone:
            if not target.exists():
                _write(target, key, build, n, size, alone)
    content = _read(target, key, n, size)
    return ImageCache(key, lambda: content)


def _refusal(key: str, problem: str) -> ValueError:
    return ValueError(
        f"image cache {key!r}: {problem}; it is not used. Delete the folder {key!r} in the cache folder and run again "
        "to rebuild it"
    )


def _checked(build: Build, n: int, size: int) -> Iterator[tuple[np.ndarray, str | None]]:
    """Each of exactly ``n`` items as an image and, if it was skipped, the reason."""
    count = 0
    for count, item in enumerate(build(), start=1):
        if count > n:
            break
        if isinstance(item, str):
            yield np.zeros((size, size), dtype=np.uint8), item
            continue
        if item.shape != (size, size) or item.dtype != np.uint8:
            raise ValueError(f"image cache: expected uint8 [{size}, {size}], got {item.dtype} {list(item.shape)}")
        yield np.ascontiguousarray(item), None
    if count != n:
        raise ValueError(f"image cache: expected {n} images, the builder gave {'more' if count > n else count}")


def _decode(build: Build, n: int, size: int) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    images = np.empty((n, size, size), dtype=np.uint8)
    checksums = np.empty(n, dtype=np.uint32)
    skipped: dict[int, str] = {}
    for row, (image, reason) in enumerate(_checked(build, n, size)):
        images[row], checksums[row] = image, zlib.crc32(image.data)
        if reason is not None:
            skipped[row] = reason
    return images, checksums, skipped


def _write(target: Path, key: str, build: Build, n: int, size: int, alone: bool) -> None:
    if alone:  # what a killed builder left behind
        for left in target.parent.glob(f".{key}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".tmp", dir=target.parent))  # readable by the owner only
    try:
        index: dict[str, Any] = {"format": FORMAT, "key": key, "shape": [n, size, size], "skipped": {}, "crc32": []}
        with (folder / "images.npy").open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (n, size, size)}
            np.lib.format.write_array_header_1_0(file, header)
            for row, (image, reason) in enumerate(_checked(build, n, size)):
                file.write(image.data)
                index["crc32"].append(zlib.crc32(image.data))
                if reason is not None:
                    index["skipped"][str(row)] = reason
            _sync(file)
        with (folder / "index.json").open("w", encoding="utf-8") as text:
            json.dump(index, text)
            _sync(text)
        _sync_folder(folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():
                raise  # otherwise another process was first: its cache has the same key, so the same content
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _read(target: Path, key: str, n: int, size: int) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    try:
        index = json.loads((target / "index.json").read_text(encoding="utf-8"))
        images = np.load(target / "images.npy", mmap_mode="r", allow_pickle=False) if n else _NO_IMAGES
        found = (index["format"], index["key"], index["shape"])
        checksums = np.asarray(index["crc32"], dtype=np.uint32)
        skipped = {int(row): str(reason) for row, reason in index["skipped"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _refusal(key, f"it cannot be read ({type(error).__name__})") from None
    shape = [n, size, size]
    if found != (FORMAT, key, shape):
        raise _refusal(key, f"it was made for another key, format or shape than uint8 {shape}")
    if n and (list(images.shape) != shape or images.dtype != np.uint8 or not images.flags.c_contiguous):
        raise _refusal(key, f"its images are {images.dtype} {list(images.shape)}, expected uint8 {shape}")
    if checksums.shape != (n,) or any(not 0 <= row < n for row in skipped):
        raise _refusal(key, "its index does not fit its images")
    return images, checksums, skipped


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Wait for sole building of a key; False where the file system has no locks (then the rename alone decides)."""
    try:
        import fcntl

        file = path.open("w")
    except (ImportError, OSError):
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True
