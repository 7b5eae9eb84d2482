"""The decoded-image cache: built once, whole or not at all, and never believed unchecked."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedvlp.data.cache import cached_images

N, SIZE = 10, 8
PIXELS = np.random.default_rng(0).integers(0, 256, (N, SIZE, SIZE), dtype=np.uint8)


def build() -> Iterator[np.ndarray | str]:
    yield from PIXELS


def never() -> Iterator[np.ndarray | str]:
    raise AssertionError("built again")


@pytest.mark.parametrize("on_disk", [True, False])
def test_rows_come_back_in_the_order_asked(tmp_path: Path, on_disk: bool) -> None:
    images = cached_images(tmp_path if on_disk else None, "k", build, N, SIZE)
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
    first = cached_images(tmp_path, "k", build, N, SIZE)
    second = cached_images(tmp_path, "k", never, N, SIZE)
    assert np.array_equal(first(np.arange(N)), second(np.arange(N)))
    assert np.array_equal(first.checksums, second.checksums)
    assert not list(tmp_path.glob("*.tmp"))
    array = np.load(tmp_path / "k" / "images.npy", allow_pickle=False)
    assert np.array_equal(array, PIXELS), "a plain npy file"


def test_without_a_folder_nothing_is_decoded_until_it_is_used() -> None:
    calls = []

    def counting() -> Iterator[np.ndarray | str]:
        calls.append(1)
        yield from PIXELS

    images = cached_images(None, "k", counting, N, SIZE)
    assert not calls
    images(np.array([3]))
    images(np.array([4]))
    assert len(calls) == 1


@pytest.mark.parametrize("on_disk", [True, False])
def test_unreadable_rows_keep_their_reason(tmp_path: Path, on_disk: bool) -> None:
    def partly() -> Iterator[np.ndarray | str]:
        yield from [PIXELS[0], "corrupt image", PIXELS[2]]

    folder = tmp_path if on_disk else None
    for source in (partly, never if on_disk else partly):
        images = cached_images(folder, "k", source, 3, SIZE)
        assert images.skipped == {1: "corrupt image"}
        assert np.array_equal(images(np.array([2])), PIXELS[2:3])


def test_an_empty_cache_is_a_cache(tmp_path: Path) -> None:
    for _ in range(2):
        images = cached_images(tmp_path, "k", lambda: iter(()), 0, SIZE)
        assert images.skipped == {}


def refused(folder: Path, key: str = "k") -> str:
    with pytest.raises(ValueError, match="not used") as caught:
        cached_images(folder, key, never, N, SIZE)(np.arange(N))
    message = str(caught.value)
    assert repr(key) in message
    assert "rebuild" in message
    return message


def test_a_changed_pixel_is_found_when_its_row_is_read(tmp_path: Path) -> None:
    cached_images(tmp_path, "k", build, N, SIZE)
    file = tmp_path / "k" / "images.npy"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1  # the last row's last pixel
    file.write_bytes(raw)
    assert "1 of 10 images" in refused(tmp_path)
    images = cached_images(tmp_path, "k", never, N, SIZE)
    assert np.array_equal(images(np.arange(N - 1)), PIXELS[:-1])


def test_truncated_pickled_and_foreign_caches_are_refused(tmp_path: Path) -> None:
    cached_images(tmp_path, "k", build, N, SIZE)
    images, index = tmp_path / "k" / "images.npy", tmp_path / "k" / "index.json"
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
    cached_images(tmp_path, "k", build, N, SIZE)
    for n, size in ((N, 4), (N + 1, SIZE), (N * 4, 4)):
        with pytest.raises(ValueError, match="another key, format or shape"):
            cached_images(tmp_path, "k", never, n, size)


@pytest.mark.parametrize("items", [list(PIXELS[:9]), [*PIXELS, PIXELS[0]], [PIXELS[0, :4]], [PIXELS[0].astype(float)]])
def test_a_builder_that_gives_the_wrong_thing_leaves_nothing(tmp_path: Path, items: list) -> None:
    with pytest.raises(ValueError, match="expected"):
        cached_images(tmp_path, "k", lambda: iter(items), N, SIZE)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert np.array_equal(cached_images(tmp_path, "k", build, N, SIZE)(np.arange(N)), PIXELS), "and can be built after"


def test_what_a_killed_builder_left_is_removed_and_never_read(tmp_path: Path) -> None:
    left = tmp_path / ".k.dead.tmp"
    left.mkdir()
    (left / "images.npy").write_bytes(b"half")
    assert np.array_equal(cached_images(tmp_path, "k", build, N, SIZE)(np.arange(N)), PIXELS)
    assert not left.exists()


def test_a_key_cannot_leave_the_folder(tmp_path: Path) -> None:
    for key in ("../x", "a/b", "", ".", "a\0"):
        with pytest.raises(ValueError, match="key"):
            cached_images(tmp_path, key, build, N, SIZE)


def _worker(folder: str, use_lock: bool, barrier, built, results) -> None:  # runs in a process of its own
    import contextlib

    from fedvlp.data import cache

    def slow() -> Iterator[np.ndarray | str]:
        with built.get_lock():
            built.value += 1
        if not use_lock:
            barrier.wait(timeout=30)  # all of them are building
        for image in PIXELS:
            time.sleep(0.01)
            yield image

    if not use_lock:
        cache._lock = lambda path: contextlib.nullcontext(False)
    images = cache.cached_images(Path(folder), "k", slow, N, SIZE)
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
