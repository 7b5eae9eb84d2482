"""Reading the images of a data set through a cache: what it keeps says something of the files, and of nothing else."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.film_files import dicom

from fedvlp.data import images, radiograph
from fedvlp.data.cache import ImageCache
from fedvlp.data.cache_build import SERIAL
from fedvlp.data.image_kinds import write_kinds
from fedvlp.data.radiograph import ImageAccessError

Image = pytest.importorskip("PIL.Image")


def write(folder: Path, count: int = 4) -> list[Path]:
    """Films of noise."""
    rng = np.random.default_rng(0)
    files = [folder / f"canary{number}.png" for number in range(count)]
    for file in files:
        Image.fromarray(rng.integers(0, 255, (24, 24), dtype=np.uint8)).save(file)
    return files


def read(folder: Path, files: list[Path]) -> ImageCache:
    return images.films("toy", [file.name for file in files], files, 16, str(folder / "cache"), SERIAL, "header")


def test_a_cache_says_how_files_store_films(tmp_path: Path) -> None:
    """In memory as on disk, at first and again; a cache of before this was noted says nothing."""
    pytest.importorskip("pydicom")
    expected = {
        "1.dcm": "DICOM, 12 bits, MONOCHROME1", "2.dcm": "DICOM, 12 bits, MONOCHROME2",
        "j2k.dcm": "DICOM, 12 bits, MONOCHROME2", "8.png": "PNG, 8 bits, grey", "16.png": "PNG, 16 bits, grey",
        "alpha.png": "PNG, 8 bits, grey with alpha", "palette.png": "PNG, 8 bits, palette",
        "colour.png": "PNG, 8 bits, colour", "grey.jpg": "JPEG, 8 bits, grey", "colour.jpg": "JPEG, 8 bits, colour",
        "cmyk.jpg": "JPEG, 8 bits, CMYK", "little.tif": "TIFF, 16 bits, grey", "big.tif": "TIFF, 16 bits, grey",
    }  # fmt: skip
    files = write_kinds(tmp_path)
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    window = dicom(tmp_path / "window.dcm", ramp, "MONOCHROME2", 8, WindowCenter=0, WindowWidth=0)
    wrong = tmp_path / "no film.png"
    wrong.write_text("canary")
    stored = [*(expected[file.name] for file in files), f"DICOM, 8 bits, MONOCHROME2{radiograph.UNUSABLE}", ""]
    for _ in range(2):
        assert read(tmp_path, [*files, window, wrong]).stored == stored
    names = [file.name for file in files]
    assert list(images.films("toy", names, files, 16, None, SERIAL, "header").stored) == stored[:-2]
    index = next((tmp_path / "cache").glob("*/index.json"))
    older = {name: value for name, value in json.loads(index.read_text()).items() if name != "stored"}
    index.write_text(json.dumps(older))
    assert read(tmp_path, [*files, window, wrong]).stored == [""] * len(stored)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "canary"), MemoryError("canary")])
def test_a_failure_of_the_machine_is_not_kept(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path)
    files[3].write_bytes(files[3].read_bytes()[:200])
    decode = radiograph._read_pil

    def hiccup(path: Path, *given: object) -> object:
        if path == files[1]:
            raise error
        return decode(path, *given)

    with monkeypatch.context() as patch:
        patch.setattr(radiograph, "_read_pil", hiccup)
        with pytest.raises(ImageAccessError) as caught:
            read(tmp_path, files)
    assert "canary" not in str(caught.value)
    assert read(tmp_path, files).skipped == {3: "corrupt image"}, "that is the film's"


def test_a_film_that_goes_while_others_are_decoded_is_not_kept_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, away = write(tmp_path), tmp_path / "away.png"
    decode = images.decode_stored

    def goes(file: Path, *given: object) -> np.ndarray:
        if file == files[2]:
            file.rename(away)
        return decode(file, *given)

    with monkeypatch.context() as patch:
        patch.setattr(images, "decode_stored", goes)
        with pytest.raises(ImageAccessError, match="an image has gone since the data set was listed") as caught:
            read(tmp_path, files)
    assert "canary" not in str(caught.value)
    away.rename(files[2])
    assert read(tmp_path, files).skipped == {}


def test_films_are_read_once_their_decoder_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the time before says that the package was missing, and is not used any more."""
    pytest.importorskip("pydicom")
    films = [dicom(tmp_path / "a.dcm", np.arange(576, dtype=np.uint16).reshape(24, 24), "MONOCHROME2", 12)]
    with monkeypatch.context() as patch:
        for name in ("pydicom", "pydicom.pixels", "pydicom.uid"):
            patch.setitem(__import__("sys").modules, name, None)
        assert read(tmp_path, films).skipped == {0: "needs the package pydicom"}
    assert read(tmp_path, films).skipped == {}
    with monkeypatch.context() as patch:
        patch.setattr(images, "decoders", lambda: ["pydicom", "another"])
        read(tmp_path, films)
    assert len([folder for folder in os.listdir(tmp_path / "cache") if folder.startswith("toy-")]) == 3


def test_a_cache_of_other_films_does_not_ask_for_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write(tmp_path)
    read(tmp_path, files)
    monkeypatch.setattr(images, "decoders", lambda: ["another"])
    monkeypatch.setattr(images, "decode_stored", lambda *given: pytest.fail("decoded again"))
    read(tmp_path, files)


def test_an_error_that_no_reader_has_foreseen_costs_one_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of the machine ends the reading: all images would fail alike."""
    for error in (ValueError("too many values to unpack"), IndexError(), KeyError("canary"), ZeroDivisionError()):

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(images, "decode_stored", fails)
        assert (
            images.film(tmp_path / "a.dcm", 16, "header") == f"an image that cannot be decoded ({type(error).__name__})"
        )
    for error in (OSError(), MemoryError(), ImportError(), ImageAccessError()):

        def stops(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(images, "decode_stored", stops)
        with pytest.raises(type(error)):
            images.film(tmp_path / "a.dcm", 16, "header")
    with pytest.raises(ValueError, match="image_size must be at least 8 pixels, got 7"):
        images.films("table", ["a"], [tmp_path / "a.png"], 7, None, SERIAL, "header")
