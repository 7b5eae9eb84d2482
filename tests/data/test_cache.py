"""The decoded-image cache: built once, whole or not at all, gone on with where it stopped, never believed unchecked."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.toy_images import PIXELS, SIZE, N, dying, pixels

from fedvlp.data import cache_build
from fedvlp.data.cache import ImageCache, cached_images, forget_oldest
from fedvlp.data.cache_build import Building


def never(row: int) -> np.ndarray:
    raise AssertionError("decoded again")


def cached(folder: Path | None, key: str, decode=pixels, n: int = N, size: int = SIZE, **building) -> ImageCache:
    return cached_images(folder, key, range(n), decode, (size, size), Building(**building))


@pytest.fixture(autouse=True)
def _no_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that decode here need no MONAI."""
    monkeypatch.setattr(cache_build, "LOADED_ONCE", ["numpy"])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 3 images, shards of 6."""
    monkeypatch.setattr(cache_build, "CHUNK", 3)
    monkeypatch.setattr(cache_build, "SHARD_BYTES", 7 * SIZE * SIZE)


@pytest.mark.parametrize("on_disk", [True, False])
def test_rows_come_back_in_the_order_asked(tmp_path: Path, on_disk: bool) -> None:
    images = cached(tmp_path if on_disk else None, "k")
    rows = np.array([7, 0, 7])
    out = images(rows)
    assert out.dtype == np.uint8
    assert np.array_equal(out, PIXELS[rows])
    out[:] = 0
    assert np.array_equal(images(rows), PIXELS[rows]), "a caller cannot write into the cache"
    assert images(np.array([], dtype=int)).shape == (0, SIZE, SIZE)
    with pytest.raises(IndexError, match=r"0\.\.9"):
        images(np.array([10]))
    with pytest.raises(IndexError, match=r"0\.\.9"):
        images(np.array([-1]))


def test_it_is_built_once_and_reused(tmp_path: Path) -> None:
    first = cached(tmp_path, "k")
    second = cached(tmp_path, "k", never)
    assert np.array_equal(first(np.arange(N)), second(np.arange(N)))
    assert np.array_equal(first.checksums, second.checksums)
    assert sorted(file.name for file in (tmp_path / "k").iterdir()) == ["images-00000.npy", "index.json"]
    array = np.load(tmp_path / "k" / "images-00000.npy", allow_pickle=False)
    assert np.array_equal(array, PIXELS), "a plain npy file"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("workers", [1, 3])
def test_shards_and_workers_change_nothing(tmp_path: Path, workers: int) -> None:
    """20 images in shards of 6: four files, the last of 2 rows, read as one."""
    told: list[tuple[int, int]] = []
    images = cached(tmp_path, "k", n=20, workers=workers, progress=lambda *ready: told.append(ready))
    rows = np.random.default_rng(1).permutation(20)
    assert np.array_equal(images(rows), PIXELS[rows % N])
    shapes = [np.load(tmp_path / "k" / f"images-{i:05d}.npy").shape[0] for i in range(4)]
    assert shapes == [6, 6, 6, 2]
    assert told[0] == (0, 20)
    assert told[-1] == (20, 20)
    assert [ready for ready, _ in told] == sorted(ready for ready, _ in told)
    assert len(told) == 1 + 7
    alone = cached(tmp_path / "alone", "k", n=20)
    assert all(
        file.read_bytes() == (tmp_path / "alone" / "k" / file.name).read_bytes() for file in (tmp_path / "k").iterdir()
    )
    assert np.array_equal(alone.checksums, images.checksums)


def test_without_a_folder_nothing_is_decoded_until_it_is_used() -> None:
    calls = []
    images = cached(None, "k", lambda row: calls.append(row) or PIXELS[row])
    assert not calls
    images(np.array([3]))
    images(np.array([4]))
    assert calls == list(range(N))


def killed_at(folder: Path, log: Path, last: int) -> None:
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=cached, args=(folder, "k", partial(dying, log=log, last=last), 20))
    worker.start()
    worker.join(timeout=30)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.usefixtures("small")
def test_a_killed_build_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Killed at row 13: chunks 0-2, 3-5, 6-8, 9-11 are kept; 12 is decoded a second time. The bytes are the same."""
    log = tmp_path / "log"
    killed_at(tmp_path, log, 13)
    assert not (tmp_path / "k").exists(), "half a cache is no cache"
    told: list[tuple[int, int]] = []
    again = partial(dying, log=log, last=-1)
    images = cached(tmp_path, "k", again, 20, progress=lambda *ready: told.append(ready))
    assert [int(line) for line in log.read_text().split()] == [*range(13), *range(12, 20)]
    assert told[0] == (12, 20)
    assert np.array_equal(images(np.arange(20)), PIXELS[np.arange(20) % N])
    cached(tmp_path / "whole", "k", n=20)
    for file in (tmp_path / "whole" / "k").iterdir():
        assert file.read_bytes() == (tmp_path / "k" / file.name).read_bytes()
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.usefixtures("small")
def test_what_an_interrupted_build_left_is_checked_before_it_is_used(tmp_path: Path) -> None:
    """A line that was cut off, a chunk whose pixels are not as noted, a journal of another build: decoded again."""
    log = tmp_path / "log"
    killed_at(tmp_path, log, 13)
    folder = tmp_path / ".k.partial"
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5  # its head and four chunks
    journal.write_bytes(b"".join(lines)[:-1])  # chunk 9-11
    shard = folder / "images-00000.npy"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1  # row 5 of chunk 3-5
    shard.write_bytes(raw)
    log.unlink()
    killed_at(tmp_path, log, 16)
    cached(tmp_path, "k", partial(dying, log=log, last=-1), 20)
    assert [int(line) for line in log.read_text().split()] == [3, 4, 5, *range(9, 16), *range(15, 20)]
    assert np.array_equal(cached(tmp_path, "k", never, 20)(np.arange(20)), PIXELS[np.arange(20) % N])
    (tmp_path / "k").rename(folder)
    journal.write_bytes(lines[0].replace(b'"chunk": 3', b'"chunk": 4') + lines[1])
    log.unlink()
    cached(tmp_path, "k", partial(dying, log=log, last=-1), 20)
    assert len(log.read_text().split()) == 20


@pytest.mark.usefixtures("small")
def test_a_worker_that_dies_is_named_and_the_build_can_go_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ValueError, match="decoding process was killed"):
        cached(tmp_path, "k", partial(dying, log=log, last=19), 20, workers=2)
    assert np.array_equal(cached(tmp_path, "k", n=20, workers=2)(np.arange(20)), PIXELS[np.arange(20) % N])


def test_a_disk_that_is_too_small_is_told_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": N * SIZE * SIZE - 1})
    monkeypatch.setattr(cache_build.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"it takes 0\.0 GB"):
        cached(tmp_path, "k", never)


@pytest.mark.parametrize("on_disk", [True, False])
def test_unreadable_rows_keep_their_reason(tmp_path: Path, on_disk: bool) -> None:
    def partly(row: int) -> np.ndarray | str:
        return "corrupt image" if row == 1 else PIXELS[row]

    folder = tmp_path if on_disk else None
    for source in (partly, never if on_disk else partly):
        images = cached(folder, "k", source, 3)
        assert images.skipped == {1: "corrupt image"}
        assert np.array_equal(images(np.array([2])), PIXELS[2:3])


def test_an_empty_cache_is_a_cache(tmp_path: Path) -> None:
    for _ in range(2):
        images = cached(tmp_path, "k", never, 0)
        assert images.skipped == {}


def refused(folder: Path, key: str = "k") -> str:
    with pytest.raises(ValueError, match="not used") as caught:
        cached(folder, key, never)(np.arange(N))
    message = str(caught.value)
    assert repr(key) in message
    assert "rebuild" in message
    return message


def test_a_changed_pixel_is_found_when_its_row_is_read(tmp_path: Path) -> None:
    cached(tmp_path, "k")
    file = tmp_path / "k" / "images-00000.npy"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1  # the last row's last pixel
    file.write_bytes(raw)
    assert "1 of 10 images" in refused(tmp_path)
    images = cached(tmp_path, "k", never)
    assert np.array_equal(images(np.arange(N - 1)), PIXELS[:-1])


def test_truncated_pickled_and_foreign_caches_are_refused(tmp_path: Path) -> None:
    cached(tmp_path, "k")
    images, index = tmp_path / "k" / "images-00000.npy", tmp_path / "k" / "index.json"
    whole = images.read_bytes()
    images.write_bytes(whole[:-5])
    assert "cannot be read" in refused(tmp_path)
    np.save(images, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "cannot be read" in refused(tmp_path)
    np.save(images, PIXELS.astype(np.float32))
    assert "float32" in refused(tmp_path)
    np.save(images, PIXELS[:, :4])
    refused(tmp_path)
    images.write_bytes(whole)
    (tmp_path / "k").rename(tmp_path / "other")
    assert "another key" in refused(tmp_path, "other")
    (tmp_path / "other").rename(tmp_path / "k")
    body = json.loads(index.read_text())
    index.write_text(json.dumps({**body, "crc32": body["crc32"][:-1]}))
    assert "index" in refused(tmp_path)
    for text in ("", "[]", '{"format": 1}', json.dumps({**body, "skipped": {"10": "x"}})):
        index.write_text(text)
        refused(tmp_path)
    index.unlink()
    refused(tmp_path)


def test_another_size_or_count_is_refused_not_reinterpreted(tmp_path: Path) -> None:
    cached(tmp_path, "k")
    for n, size in ((N, 4), (N + 1, SIZE), (N * 4, 4)):
        with pytest.raises(ValueError, match="another key, format or shape"):
            cached(tmp_path, "k", never, n, size)


@pytest.mark.parametrize("image", [PIXELS[0, :4], PIXELS[0].astype(float)])
def test_a_decoder_that_gives_the_wrong_thing_makes_no_cache(tmp_path: Path, image: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected uint8 \[8, 8\]"):
        cached(tmp_path, "k", lambda row: image)
    assert not (tmp_path / "k").exists()
    assert np.array_equal(cached(tmp_path, "k")(np.arange(N)), PIXELS), "and it can be built after"


def test_what_a_killed_builder_without_a_lock_left_is_removed_and_never_read(tmp_path: Path) -> None:
    left = tmp_path / ".k.dead.tmp"
    left.mkdir()
    (left / "images-00000.npy").write_bytes(b"half")
    assert np.array_equal(cached(tmp_path, "k")(np.arange(N)), PIXELS)
    assert not left.exists()


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        cached(tmp_path / "cache", "k")
    finally:
        os.umask(before)
    for folder in (tmp_path / "cache", tmp_path / "cache" / "k"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_key_cannot_leave_the_folder(tmp_path: Path) -> None:
    for key in ("../x", "a/b", "", ".", "a\0"):
        with pytest.raises(ValueError, match="key"):
            cached(tmp_path, key)


def _slow(row: int, use_lock: bool, barrier, built) -> np.ndarray:
    if row == 0:
        with built.get_lock():
            built.value += 1
        if not use_lock:
            barrier.wait(timeout=30)  # all of them are building
    time.sleep(0.01)
    return PIXELS[row]


def _worker(folder: str, use_lock: bool, barrier, built, results) -> None:  # runs in a process of its own
    import contextlib

    from fedvlp.data import cache

    if not use_lock:
        cache._lock = lambda path: contextlib.nullcontext(False)
    images = cached(Path(folder), "k", partial(_slow, use_lock=use_lock, barrier=barrier, built=built))
    results.put(bool(np.array_equal(images(np.arange(N)), PIXELS)))


@pytest.mark.parametrize("use_lock", [True, False])
def test_concurrent_builders_agree(tmp_path: Path, use_lock: bool) -> None:
    context = multiprocessing.get_context("fork")
    barrier, built, results = context.Barrier(3), context.Value("i", 0), context.Queue()
    workers = [
        context.Process(target=_worker, args=(str(tmp_path), use_lock, barrier, built, results)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=30) for _ in workers] == [True] * 3
    for worker in workers:
        worker.join(timeout=30)
        assert worker.exitcode == 0
    assert built.value == (1 if use_lock else 3)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["k"]


def coloured(row: int) -> np.ndarray:
    return np.stack([PIXELS[row], PIXELS[row] // 2, PIXELS[row] // 3], axis=2)


@pytest.mark.parametrize("on_disk", [True, False])
def test_images_in_colour_are_kept_with_their_channels(tmp_path: Path, small: None, on_disk: bool) -> None:
    """On disk in four shards; what was kept in colour is not taken for grey."""
    folder = tmp_path if on_disk else None
    images = cached_images(folder, "k", range(N), coloured, (SIZE, SIZE, 3))
    rows = np.array([9, 2])
    assert np.array_equal(images(rows), np.stack([coloured(9), coloured(2)]))
    if on_disk:
        assert len(list((tmp_path / "k").glob("*.npy"))) == 4
        with pytest.raises(ValueError, match=r"another key, format or shape than uint8 \[10, 8, 8\]"):
            cached(tmp_path, "k", never)
    with pytest.raises(ValueError, match=r"expected uint8 \[8, 8\], got uint8 \[8, 8, 3\]"):
        cached(None, "other", coloured)(rows)


def test_the_caches_used_least_recently_go_until_the_rest_is_small_enough(tmp_path: Path) -> None:
    """Interrupted builds too, but not what somebody builds, and never the one that was used last, however large."""
    folders = tmp_path / "a", tmp_path / "b"
    readers = {key: cached(folder, key) for folder, key in zip((*folders, *folders), "wxyz", strict=True)}
    for used, (folder, key) in enumerate(zip((*folders, *folders), "wxyz", strict=True)):
        os.utime(folder / key, (used, used))  # two that are used within a tick of the system's clock are as old
    (tmp_path / "b" / "x").rename(tmp_path / "b" / ".x.partial")
    cached(tmp_path / "a", "w")  # used again
    size = sum(file.stat().st_blocks * 512 for file in (tmp_path / "a" / "w").iterdir())

    def left() -> set[str]:
        return {file.parent.name for folder in folders for file in folder.glob("*/index.json")}

    forget_oldest(folders, 4 * size)
    assert left() == {"w", ".x.partial", "y", "z"}
    with (tmp_path / "b" / ".x.lock").open("w") as built:
        fcntl.flock(built, fcntl.LOCK_EX)
        forget_oldest(folders, 3 * size)
    assert left() == {"w", ".x.partial", "z"}
    forget_oldest(folders, 2 * size)
    assert left() == {"w", "z"}
    assert np.array_equal(readers["y"](np.arange(N)), PIXELS), "whoever reads one keeps it"
    forget_oldest(folders, 0)
    assert left() == {"w"}
