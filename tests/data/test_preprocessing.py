"""Films in memory are prepared as files are, whatever they are; what cannot be used is named by its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.film_files import dicom

from fedvlp.data.images import decode
from fedvlp.data.loader import eval_batch
from fedvlp.data.preprocessing import AS_WRITTEN, CLEANED, PreparationError, Preprocessing
from fedvlp.data.report_text import clean_phrase, clean_report

RNG = np.random.default_rng(0)
FILMS = {
    "grey": RNG.integers(0, 256, (61, 43), dtype=np.uint8),
    "wide": RNG.integers(0, 256, (21, 90), dtype=np.uint8),
    "deep": RNG.integers(0, 4096, (50, 64)).astype(np.uint16),
    "colour": RNG.integers(0, 256, (40, 30, 3), dtype=np.uint8),
}
HOW = Preprocessing(18, 16)


def by_the_pipeline(path: Path) -> torch.Tensor:
    """As a data set's reader and the loader of batches do it."""
    return eval_batch(torch.from_numpy(decode(path, 18))[None], 16)


def test_a_file_an_image_and_an_array_are_the_same_film(tmp_path: Path) -> None:
    for name in FILMS:
        path = tmp_path / "film.png"
        Image.fromarray(FILMS[name]).save(path)
        expected = by_the_pipeline(path)
        assert expected.shape == (1, 1, 16, 16)
        with Image.open(path) as image:
            for film in (path, str(path), image, FILMS[name], FILMS[name][::-1][::-1]):
                assert torch.equal(HOW.films([film]), expected), type(film)


def test_a_dataset_is_the_same_film_as_its_file(tmp_path: Path) -> None:
    """Also where a window is applied, and where its header says that text is burned in: its owner may look at it."""
    for name in ["grey", "deep"]:
        for photometric in ["MONOCHROME1", "MONOCHROME2"]:
            from pydicom import dcmread

            bits = 8 if name == "grey" else 12
            path = dicom(tmp_path / "film.dcm", FILMS[name], photometric, bits, WindowCenter=90, WindowWidth=120)
            expected = by_the_pipeline(path)
            dataset = dcmread(path)
            assert torch.equal(HOW.films([path]), expected)
            assert torch.equal(HOW.films([dataset]), expected)
            assert dataset.PatientName == "Canary^Name", "what is given is left as it was"
            dataset.BurnedInAnnotation = "YES"
            assert torch.equal(HOW.films([dataset]), expected)


BAD: dict[str, tuple[Any, str]] = {
    "missing": (Path("nowhere/canary.png"), r"missing image \(there is no such file\)"),
    "garbage": (b"not an image", r"unsupported image format \(PNG, JPEG, TIFF and DICOM are read\)"),
    "cut": (b"\x00" * 128 + b"DICM" + b"canary", "unsupported transfer syntax"),
    "cut png": (b"\x89PNG\r\n\x1a\ncanary", "unsupported image format|corrupt image"),
    "constant": (np.full((20, 20), 7, dtype=np.uint8), "constant image"),
    "nan": (np.full((20, 20), np.nan), "corrupt image"),
    "flat": (np.zeros((4, 20), dtype=np.uint8), "unsupported image shape"),
    "four channels": (np.zeros((20, 20, 4), dtype=np.uint8), "unsupported kind of array"),
    "number": (3, "unsupported kind of image: int"),
}


def test_a_film_that_cannot_be_used_is_named_by_its_number(tmp_path: Path) -> None:
    for name in BAD:
        film, said = BAD[name]
        if isinstance(film, bytes):
            path = tmp_path / "canary.xyz"
            path.write_bytes(film)
            film = path
        with pytest.raises(PreparationError, match=f"^image 2 of 2 cannot be used: {said}") as caught:
            HOW.films([FILMS["grey"], film])
        assert "canary" not in str(caught.value)
        with pytest.raises(PreparationError, match=r"^the image cannot be used"):
            HOW.films([film])


def test_its_description_is_enough_to_do_it_again() -> None:
    for reports in (CLEANED, AS_WRITTEN):
        how = Preprocessing(18, 16, reports)
        assert Preprocessing.read(how.described()) == how
    described = HOW.described()
    with pytest.raises(ValueError, match=r"preprocessing: longest_side is missing in config\.json"):
        Preprocessing.read({key: value for key, value in described.items() if key != "longest_side"})
    with pytest.raises(ValueError, match="no whole numbers"):
        Preprocessing.read({**described, "input_size": "16"})
    other = Preprocessing.read({**described, "decoding": "radiograph-1"})
    with pytest.raises(PreparationError, match="decoded by 'radiograph-1', and this fedvlp decodes by"):
        other.films([FILMS["grey"]])


def test_settings_are_checked() -> None:
    for settings, said in [
        ((16, 18), "cannot crop 18 pixels from images of 16"),
        ((16, 4), "at least 8"),
        ((16, 16, "x"), "reports are 'x'"),
    ]:
        with pytest.raises(ValueError, match=said):
            Preprocessing(*settings)


def test_phrases_become_what_reports_became() -> None:
    report = "FINDINGS: Small LEFT effusion. Normal. 1. No pneumothórax!"
    cleaned = Preprocessing(18, 16, CLEANED)
    assert cleaned.text(report) == clean_report(report) == "findings small left effusion normal no pneumothorax"
    assert cleaned.text("Pneumonia.") == clean_phrase("Pneumonia.") == "pneumonia"
    assert cleaned.text("left basal effusion") == "left basal effusion"
    assert HOW.text(report) == report


def test_films_in_colour_as_the_records_were(tmp_path: Path) -> None:
    """A model's folder says so; one of grey films says what it said before."""
    how = Preprocessing(18, 16, colour=True)
    assert Preprocessing.read(how.described()) == how
    assert "colour" not in HOW.described()
    path = tmp_path / "film.png"
    Image.fromarray(FILMS["colour"]).save(path)
    films = how.films([path, FILMS["colour"], FILMS["grey"]])
    assert films.shape == (3, 3, 16, 16)
    expected = eval_batch(torch.from_numpy(decode(path, 18, False, True))[None], 16)
    assert torch.equal(films[:1], expected)
    assert torch.equal(films[1:2], expected)
    assert torch.equal(films[2:, :1], HOW.films([FILMS["grey"]]))
    assert how.films([]).shape == (0, 3, 16, 16)
