"""Decoded images in a few large array files: built once, shared by all processes of a site, checked when read.

A cache is the folder ``<key>``. It holds shards of about 1 GB, ``images-00000.npy`` (uint8 [n, S, S], in colour
[n, S, S, 3], no pickle) and so on, and ``index.json`` (shape, rows per shard, skipped rows, how files store the images,
and a CRC-32 per row). It is built under another name and renamed when complete, so a reader sees all of it or none. A
row's CRC is compared when a process first reads the row.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedvlp.data.cache_build import FORMAT, SERIAL, Building, Decode, Shards


@dataclass(frozen=True, eq=False)
class _Content:
    """An opened cache of N images."""

    gather: Callable[[np.ndarray], np.ndarray]  # rows [n] to uint8 [n, *shape], a copy
    checksums: np.ndarray  # [N] uint32
    skipped: dict[int, str]
    trusted: np.ndarray  # [N] bool: rows whose CRC this process has compared
    stored: Sequence[str]  # [N] how the file of each stores it; "" where nobody noted it, as in older caches


class ImageCache:
    """Reader of decoded images: rows [n] to uint8 [n, S, S] or [n, S, S, 3], a copy. Skipped rows are zeros."""

    def __init__(self, key: str, open_: Callable[[], _Content]) -> None:
        self._key = key
        self._open = open_
        self._opened: _Content | None = None

    def _content(self) -> _Content:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    @property
    def skipped(self) -> dict[int, str]:
        """Row -> reason, for the rows that have no readable image."""
        return dict(self._content().skipped)

    @property
    def checksums(self) -> np.ndarray:
        """CRC-32 of each row's pixels, [N] uint32: the same on every machine that decodes the same pixels."""
        return self._content().checksums

    @property
    def stored(self) -> Sequence[str]:
        """How the file of each row stores its image: container, bits, photometric interpretation. "": not known."""
        return self._content().stored

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, *shape] of ``rows`` [n]; IndexError outside of 0..N-1, ValueError where pixels are damaged."""
        content = self._content()
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(content.checksums)):
            raise IndexError(f"image cache {self._key!r}: rows must be in 0..{len(content.checksums) - 1}")
        chosen = content.gather(rows)
        fresh = np.flatnonzero(~content.trusted[rows])  # indices into ``rows``
        damaged = sum(zlib.crc32(chosen[index].data) != content.checksums[rows[index]] for index in fresh)
        if damaged:
            raise _refusal(self._key, f"{damaged} of {len(rows)} images do not match their checksum")
        content.trusted[rows[fresh]] = True
        return chosen


def cached_images(
    folder: Path | None,
    key: str,
    items: Sequence[Any],
    decode: Decode,
    shape: tuple[int, ...],
    building: Building = SERIAL,
) -> ImageCache:
    """Reader of the N images of one ``shape`` (``cache_build.shape_of``) that ``decode`` makes of the N ``items``.

    With a folder, the cache of this ``key`` is built now, or used if it is there already. The key must determine the
    pixels: the caller puts files and transform into it. A build that was interrupted continues after its last complete
    chunk. Without a folder the images are decoded at first use and stay in memory. Raises ValueError for a cache that
    is damaged or was made for something else. Errors of ``decode`` pass through.
    """
    from fedvlp.data.cache_build import decoded, write

    if not re.fullmatch(r"[0-9A-Za-z_-]{1,80}", key):
        raise ValueError("image cache: a key is 1 to 80 letters, digits, - and _")
    n = len(items)
    if folder is None:

        def in_memory() -> _Content:
            images, checksums, skipped, stored = decoded(decode, items, shape)
            return _Content(images.__getitem__, np.array(checksums, np.uint32), skipped, np.ones(n, dtype=bool), stored)

        return ImageCache(key, in_memory)
    target = Path(folder) / key
    if not target.exists():
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(Path(folder) / f".{key}.lock") as alone:
            if not target.exists():
                write(target, key, items, decode, shape, building, alone)
    content = _read(target, key, n, shape)
    os.utime(target)  # so that forget_oldest knows when it was used
    return ImageCache(key, lambda: content)


def forget_oldest(folders: Iterable[Path], most: int) -> None:
    """Deletes caches, those used least recently first, until all ``folders`` together hold at most ``most`` bytes.

    Builds that were interrupted count as well. The one that was used last stays, and so does what is being built.
    A process that reads one that goes keeps it until it ends: its files are open.
    """
    caches = {file.parent for folder in folders for file in folder.glob("*/images-00000.npy")}
    by_age = sorted(caches, key=lambda cache: cache.stat().st_mtime_ns)
    sizes = [sum(file.stat().st_blocks * 512 for file in cache.iterdir()) for cache in by_age]
    whole = sum(sizes)
    for cache, size in zip(by_age[:-1], sizes, strict=False):
        if whole <= most:
            return
        key = cache.name.strip(".").partition(".")[0]
        with _lock(cache.parent / f".{key}.lock", wait=False) as alone:
            if not alone:
                continue
            gone = cache.with_name(f".{key}.gone")  # at once, so that nobody finds half of it
            shutil.rmtree(gone, ignore_errors=True)
            cache.rename(gone)
            shutil.rmtree(gone)
            whole -= size


def _refusal(key: str, problem: str) -> ValueError:
    return ValueError(
        f"image cache {key!r}: {problem}; it is not used. Delete the folder {key!r} in the cache folder and run again "
        "to rebuild it"
    )


def _read(target: Path, key: str, n: int, shape: tuple[int, ...]) -> _Content:
    try:
        index = json.loads((target / "index.json").read_text(encoding="utf-8"))
        head = (index["format"], index["key"], index["shape"])
        checksums = np.asarray(index["crc32"], dtype=np.uint32)
        skipped = {int(row): str(reason) for row, reason in index["skipped"].items()}
        per = int(index["rows_per_shard"])
        stored = [str(kind) for kind, run in index.get("stored", [("", n)]) for _ in range(run)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _refusal(key, f"it cannot be read ({type(error).__name__})") from None
    if head != (FORMAT, key, [n, *shape]):
        raise _refusal(key, f"it was made for another key, format or shape than uint8 {[n, *shape]}")
    if checksums.shape != (n,) or len(stored) != n or any(not 0 <= row < n for row in skipped) or per < 1:
        raise _refusal(key, "its index does not fit its images")
    try:
        shards = Shards(target, n, shape, per)
    except (OSError, ValueError) as error:
        why = error if type(error) is ValueError else type(error).__name__
        raise _refusal(key, f"its array files cannot be read ({why})") from None
    return _Content(shards, checksums, skipped, np.zeros(n, dtype=bool), stored)


@contextlib.contextmanager
def _lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Waits until nobody else builds this key. Yields False where the file system has no locks: the rename decides.

    Not to ``wait`` yields False as well where somebody builds it.
    """
    try:
        import fcntl

        file = path.open("w")
    except (ImportError, OSError):
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
