"""Building an image cache: chunks are decoded in parallel and written to disk before they count; a build resumes."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

# What the reader and the builder of an image cache share: format, array files, settings of a build.

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


CHUNK = 256  # images that are decoded, written and counted together
LOADED_ONCE = ["cv2", "fedvlp.data.images"]  # modules that the decoding processes share
Decoded = tuple[np.ndarray, list[int], dict[int, str], list[str]]
"""Images [n, *shape] uint8, the CRC-32 of each, index -> reason for those that could not be read (zeros), and how the

file of each stores it, "" where nobody says.
"""


def decoded(decode: Decode, items: Sequence[Any], shape: tuple[int, ...]) -> Decoded:
    """The images of ``items``. Raises ValueError where ``decode`` gives anything but uint8 ``shape`` or a reason."""
    images = np.zeros((len(items), *shape), dtype=np.uint8)
    skipped: dict[int, str] = {}
    stored = [""] * len(items)
    for index, item in enumerate(items):
        image = decode(item)
        if isinstance(image, tuple):
            image, stored[index] = image
        if isinstance(image, str):
            skipped[index] = image
        elif image.shape != shape or image.dtype != np.uint8:
            raise ValueError(f"image cache: expected uint8 {list(shape)}, got {image.dtype} {list(image.shape)}")
        else:
            images[index] = image
    return images, [zlib.crc32(image.data) for image in images], skipped, stored


def write(
    target: Path,
    key: str,
    items: Sequence[Any],
    decode: Decode,
    shape: tuple[int, ...],
    building: Building,
    alone: bool,
) -> None:
    """Builds the cache folder ``target`` from ``items``, each decoded to uint8 of this ``shape``.

    ``alone`` says that nobody else builds this key. Only then is an interrupted build kept and continued: without a
    lock, two builders would write to the same files. Raises ValueError where the disk is too small or a decoding
    process was killed.
    """
    if alone:
        for left in target.parent.glob(f".{key}.*.tmp"):  # left by a builder that had no lock and was killed
            shutil.rmtree(left, ignore_errors=True)
        folder = target.parent / f".{key}.partial"
        folder.mkdir(mode=0o700, exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".tmp", dir=target.parent))
    try:
        partial_ = _Partial(folder, key, len(items), shape)
        chunks = {start: items[start : start + CHUNK] for start in partial_.missing()}
        tell = building.progress or (lambda ready, rows: None)
        tell(partial_.ready, len(items))
        for start, chunk in _side_by_side(partial(decoded, decode, shape=shape), chunks, building.workers):
            partial_.add(start, chunk)
            tell(partial_.ready, len(items))
        partial_.finish()
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():
                raise  # otherwise another process was first: its cache has the same key, so the same content
        _sync_folder(target.parent)
    finally:
        if not alone:
            shutil.rmtree(folder, ignore_errors=True)


def _side_by_side(
    work: Callable[[Sequence[Any]], Decoded], chunks: dict[int, Sequence[Any]], workers: int
) -> Iterator[tuple[int, Decoded]]:
    """(start, decoded chunk) in any order. At most two chunks per worker are in progress, to spare memory."""
    if workers <= 1 or len(chunks) <= 1:
        for start, items in chunks.items():
            yield start, work(items)
        return
    context = multiprocessing.get_context("forkserver")  # not fork: OpenCV's threads here would be missed there
    context.set_forkserver_preload(LOADED_ONCE)
    with ProcessPoolExecutor(min(workers, len(chunks)), context, _one_thread) as pool:
        waiting = iter(chunks.items())
        try:
            running = {pool.submit(work, items): start for start, items in islice(waiting, 2 * workers)}
            while running:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
                    running |= {pool.submit(work, items): start for start, items in islice(waiting, 1)}
        except BrokenProcessPool:
            raise ValueError(
                "image cache: a decoding process was killed (memory?); run again, with fewer workers, to resume"
            ) from None


def _one_thread() -> None:
    """Limits a decoding process to one thread: the processes share the cores."""
    import cv2
    import torch

    torch.set_num_threads(1)
    cv2.setNumThreads(1)


class _Partial:
    """A cache under construction: array files of full length, and a journal with a line for each complete chunk."""

    def __init__(self, folder: Path, key: str, n: int, shape: tuple[int, ...]) -> None:
        self._folder, self._key, self._n, self._shape = folder, key, n, shape
        self._bytes = math.prod(shape)  # of one image
        self._per = max(1, SHARD_BYTES // (CHUNK * self._bytes)) * CHUNK
        self._head = {"format": FORMAT, "shape": [n, *shape], "chunk": CHUNK, "rows_per_shard": self._per}
        self._done: dict[int, dict[str, Any]] = {}
        journal = folder / "journal.jsonl"
        length = self._resume(journal) if journal.exists() else 0
        if not length:
            self._start_anew()
        self._journal = journal.open("ab")
        self._journal.truncate(length)  # drops a line that was cut off
        if not length:
            self._note(self._head)

    @property
    def ready(self) -> int:
        """Rows that are on disk."""
        return sum(len(entry["crc32"]) for entry in self._done.values())

    def missing(self) -> list[int]:
        """First rows of the chunks that are still to be decoded, ascending."""
        return [start for start in range(0, self._n, CHUNK) if start not in self._done]

    def add(self, start: int, chunk: Decoded) -> None:
        """Writes the chunk that begins at row ``start``, then its line: whatever the journal names is on disk."""
        images, checksums, skipped, stored = chunk
        shard, within = divmod(start, self._per)  # a chunk lies in one shard
        name = self._file(shard)
        offset = np.load(name, mmap_mode="r", allow_pickle=False).offset
        with name.open("r+b") as file:
            file.seek(offset + within * self._bytes)
            file.write(images.data)
            _sync(file)
        entry = {"start": start, "crc32": checksums, "skipped": skipped, "stored": stored}
        self._note(entry)
        self._done[start] = entry

    def finish(self) -> None:
        """Writes the index and removes the journal, which is needed no longer."""
        entries = [self._done[start] for start in sorted(self._done)]
        skipped: dict[int, str] = {}
        checksums: list[int] = []
        stored: list[str] = []
        for entry in entries:
            skipped |= {entry["start"] + int(index): reason for index, reason in entry["skipped"].items()}
            checksums += entry["crc32"]
            stored += entry.get("stored") or [""] * len(entry["crc32"])
        index = {
            "format": FORMAT,
            "key": self._key,
            "shape": [self._n, *self._shape],
            "rows_per_shard": self._per,
            "skipped": skipped,
            "crc32": checksums,
            "stored": [(kind, len(list(run))) for kind, run in groupby(stored)],
        }
        with (self._folder / "index.json").open("w", encoding="utf-8") as file:
            json.dump(index, file)
            _sync(file)
        self._journal.close()
        (self._folder / "journal.jsonl").unlink()
        _sync_folder(self._folder)

    def _file(self, shard: int) -> Path:
        return self._folder / f"images-{shard:05d}.npy"

    def _note(self, entry: dict[str, Any]) -> None:
        self._journal.write(json.dumps(entry).encode() + b"\n")
        _sync(self._journal)

    def _start_anew(self) -> None:
        """Creates empty array files of full length. Raises ValueError where the disk cannot hold them."""
        for left in self._folder.iterdir():
            left.unlink()
        needed, free = self._n * self._bytes, shutil.disk_usage(self._folder).free
        if needed > free:
            raise ValueError(f"image cache: it takes {needed / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free")
        for shard, first in enumerate(range(0, self._n, self._per)):
            shape = (min(self._per, self._n - first), *self._shape)
            np.lib.format.open_memmap(self._file(shard), mode="w+", dtype=np.uint8, shape=shape)

    def _resume(self, journal: Path) -> int:
        """Takes over the chunks of an interrupted build whose pixels match their checksums.

        Returns how many bytes of the journal are valid; 0 where nothing can be taken over.
        """
        length = 0
        try:
            shards = Shards(self._folder, self._n, self._shape, self._per)
            for line in journal.read_bytes().splitlines(keepends=True):
                entry = json.loads(line) if line.endswith(b"\n") else None
                if entry is None or (not length and entry != self._head):
                    break
                if length:
                    rows = np.arange(entry["start"], entry["start"] + len(entry["crc32"]))
                    if [zlib.crc32(image.data) for image in shards(rows)] == entry["crc32"]:
                        self._done[entry["start"]] = entry
                length += len(line)
        except (OSError, ValueError, KeyError, TypeError):  # not ours, or damaged: what was valid up to here is used
            pass
        return length


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
