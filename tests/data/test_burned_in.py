"""Spec faults, row 18: films with a name, a number or a date in their pixels are left out and counted, or accepted.

The films are the synthetic cohort's under a black edge, as a detector leaves it, with words drawn into that edge.
"""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedvlp.data import burned_in, images
from fedvlp.data.burned_in import ACCEPT, HEADER, SEARCH, UNSEARCHED, holds_text, may_identify
from fedvlp.data.cache_build import SERIAL
from fedvlp.data.images import films
from fedvlp.data.screening import rows_used
from fedvlp.data.sources.openi import OpenISource
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.deploy.prepare import prepared
from fedvlp.deploy.site_config import SiteConfig
from fedvlp.deploy.site_doctor import _data

Image = pytest.importorskip("PIL.Image")
needs_reader = pytest.mark.skipif(not burned_in.can_search(), reason="pip install 'fedvlp[ocr]'")

IDENTITIES = ("FERREIRA^ANNA", "MRN 44711992", "12/03/1961")
MARKERS = ("L", "R", "AP ERECT", "PORTABLE", "SUPINE")
EDGE = 60  # pixels


@pytest.fixture(scope="module")
def clean() -> np.ndarray:
    """Six films of three sites, uint8 [6, 512, 512]; some have a marker of their own."""
    return SyntheticCohort(size=12, sites=3, image_size=512).build().images(np.arange(6))


def drawn(film: np.ndarray, text: str, letters: int = 24, bright: bool = True) -> np.ndarray:
    """The film under an edge in which ``text`` stands: white on black, or black on white."""
    from PIL import ImageDraw, ImageFont

    paper, ink = (0, 255) if bright else (255, 0)
    larger = np.vstack([np.full((EDGE, film.shape[1]), paper, np.uint8), film])
    image = Image.fromarray(larger)
    ImageDraw.Draw(image).text((20, 16), text, ink, font=ImageFont.load_default(letters))
    return np.asarray(image)


@needs_reader
@pytest.mark.parametrize("text", IDENTITIES)
def test_what_identifies_is_found(clean: np.ndarray, text: str) -> None:
    """On a film of every site; in letters of 16 to 32 pixels, bright and dark, on a large film and on a small one."""
    assert all(holds_text(drawn(film, text)) for film in clean[:: len(clean) // 3])
    assert all(holds_text(drawn(clean[0], text, letters, bright)) for letters, bright in ((16, True), (32, False)))
    large = np.kron(clean[1], np.ones((4, 4), np.uint8))  # 2048 x 2048
    assert holds_text(drawn(large, text, letters=40).astype(np.float32))


@needs_reader
def test_a_film_and_its_markers_pass(clean: np.ndarray) -> None:
    assert [holds_text(film) for film in clean] == [False] * 6
    assert [text for text in MARKERS for film in clean[:2] if holds_text(drawn(film, text))] == []


@pytest.mark.parametrize("confidence", ["71.914597", "71,914597"])
def test_a_reader_with_decimal_commas_is_understood(confidence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program that fedvlp runs in has set its locale, Tesseract writes its confidence in that."""
    line = "\t".join([burned_in.WORD, *["0"] * 9, confidence, "ANNA"])
    told = SimpleNamespace(SetImage=lambda _: None, GetTSVText=lambda _: f"{line}\n", Clear=lambda: None)
    monkeypatch.setattr(burned_in, "_reader", lambda: told)
    assert burned_in._words(np.zeros((4, 4), np.uint8)) == [("ANNA", 71.914597)]


def test_what_counts_as_text() -> None:
    """Words and Tesseract's confidence of them."""
    text = [
        ("FERREIRA", 90),
        ("12/03/1961", 61),
        ("4471", 60),
        ("1ERECT", 90),
        ("FERREI", 45),
        ("anna", 90),
        ("4ab", 60),
        ("WRIGHT", 90),
        ("PORTER", 90),
        ("CHESTER", 90),
        ("PAPA", 90),
        ("ERECT-FERREIRA", 90),
        ("12:98", 65),
    ]
    none = [
        ("L", 99), ("AP", 99), ("ERECT", 95), ("ERECI", 95), ("Semi-erect", 90), ("1961", 59), ("---", 99), ("", 99),
        ("FERREI", 44), ("FERRE", 50), ("arf", 89), ("RAP", 90), ("APERECTMOBILE", 90), ("AP-PORT-SEMUPRIGHT", 67),
        ("AP-PORT-SEMIUPRIG", 90), ("Portable,", 90), ("x-ray", 97), ("SUPINE/ICU", 90), ("LIEGEND", 90),
        ("MOBILEAP", 90), ("decubitus", 95),
    ]  # fmt: skip
    assert [one for one in text if not may_identify(*one)] == []
    assert [one for one in none if may_identify(*one)] == []


def export(folder: Path, clean: np.ndarray) -> TableSource:
    """A hospital's table: a film as PNG and as DICOM for each identity and for two markers, and two films without."""
    dicom = pytest.importorskip("pydicom")
    written = write(SyntheticCohort(sites=1, size=4, image_size=64), folder / "like", format="dicom").parent
    like = dicom.dcmread(next(written.rglob("*.dcm")))
    like.BurnedInAnnotation = "NO"
    texts = [*IDENTITIES, "L", "AP ERECT", ""]
    rows = []
    for number, text in enumerate(texts):
        film = drawn(clean[number % len(clean)], text)
        Image.fromarray(film).save(folder / f"{number}.png")
        like.Rows, like.Columns = film.shape
        like.PhotometricInterpretation = "MONOCHROME2"
        like.WindowCenter, like.WindowWidth = 128, 256
        like.PixelData = film.astype("<u2").tobytes()
        like.save_as(folder / f"{number}.dcm")
        rows += [[f"{number}.{kind}", "No edema is seen today.", f"{kind}{number}"] for kind in ("png", "dcm")]
    with (folder / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "report", "patient_id"], *rows])
    return TableSource(str(folder / "pairs.csv"), image_size=32, max_skipped=0.6)


@needs_reader
def test_films_with_an_identity_are_left_out_and_counted(
    tmp_path: Path, clean: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 12 the 6 with one, PNG or DICOM, whether prepared ahead or read at first use; no word of them is repeated."""
    source = export(tmp_path, clean)
    with caplog.at_level(logging.INFO):
        cohort, summary = source.prepare()
    assert {name: count for name, count in summary.items() if count} == {
        "rows": 12, "used": 6, "patients": 6, "skipped: burned-in text": 6
    }  # fmt: skip
    kept = TableSource(**{**vars(source), "cache": str(tmp_path / "cache")})
    ready = prepared(kept, 1, lambda ready, rows: None)
    assert ready.summary == summary
    assert ready.cohort.fingerprint == cohort.fingerprint
    assert not [word for word in ("FERREIRA", "44711992", "1961") if word in caplog.text]


def test_the_line_counts_by_view_and_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a person sees when bedside images are taken out; a table without views has no such counts."""
    write(SyntheticCohort(sites=1, size=6, image_size=36), tmp_path)
    with (tmp_path / "pairs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, view in zip(rows, ["AP", "portable", "PA", "AP", "", ""], strict=True):
        row["seen_from"] = view
    with (tmp_path / "few.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    monkeypatch.setattr(images, "can_search", lambda: True)
    for column, by_view in (("seen_from", "by view: AP 2, not known 1, portable 1; "), ("", "")):
        texts = iter([True, True, False, True, False, True])
        monkeypatch.setattr(images, "holds_text", lambda pixels, texts=texts: next(texts))
        source = TableSource(str(tmp_path / "few.csv"), image_size=16, max_skipped=0.9, view_column=column)
        said = rows_used(source.prepare()[1])
        assert f"left out: burned-in text 4 ({by_view}look at some; data.burned_in=header keeps" in said


@needs_reader
def test_the_site_accepts_them_by_a_setting_of_its_own_file(tmp_path: Path, clean: np.ndarray) -> None:
    """And what was decoded one way is not taken for the other."""
    kit, data = tmp_path / "kit", tmp_path / "kit" / "data"
    (kit / "local").mkdir(parents=True)
    data.mkdir()
    export(data, clean)

    def counts(burned_in: str) -> dict[str, int]:
        entry = {"source": "table", "path": "pairs.csv", "cache": "cache", "burned_in": burned_in, "max_skipped": 0.6}
        (kit / "local" / "fedvlp.json").write_text(json.dumps({"data": {"films": entry}}))
        return SiteConfig.load(kit / "local").data["films"].prepare()[1]

    assert (counts(SEARCH)["used"], counts(SEARCH).get(UNSEARCHED)) == (6, None)
    for choice in (ACCEPT, HEADER):
        assert (counts(choice)["used"], counts(choice)[UNSEARCHED]) == (12, 12)
    with pytest.raises(ValueError, match="burned_in is 'acept'; choose one of search, header, accept"):
        counts("acept")


def test_the_header_is_believed_unless_the_site_accepts(tmp_path: Path) -> None:
    """The built-in cohort's DICOM files all say that text is burned in."""
    pytest.importorskip("pydicom")
    folder = write(SyntheticCohort(sites=1, size=4, image_size=64), tmp_path, format="dicom").parent
    files = sorted(folder.rglob("*.dcm"))
    for choice, skipped in ((SEARCH, 4), (HEADER, 4), (ACCEPT, 0)):
        assert len(films("table", list("abcd"), files, 16, None, SERIAL, choice).skipped) == skipped


def test_without_the_extra_it_is_said_that_nobody_looked(
    tmp_path: Path, clean: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, in the summary, and in the doctor's words."""
    monkeypatch.setattr(burned_in, "find_spec", lambda name: None)
    (tmp_path / "data").mkdir()
    source = export(tmp_path / "data", clean[:1])
    with caplog.at_level(logging.WARNING):
        assert source.prepare()[1][UNSEARCHED] == 12
    assert "12 images not searched for burned-in text; pip install 'fedvlp[ocr]'" in caplog.text
    (tmp_path / "local").mkdir()
    entry = {"source": "table", "path": "pairs.csv"}
    (tmp_path / "local" / "fedvlp.json").write_text(json.dumps({"data": {"films": entry}}))
    said = {check.what: check for check in _data(tmp_path / "local")}
    assert said["text in images of films"].ok is None
    assert "NOT searched: pip install 'fedvlp[ocr]'" in said["text in images of films"].found


def test_what_is_published_is_searched_where_that_is_asked_for() -> None:
    assert OpenISource(path="x").burned_in == HEADER
    assert TableSource("x").burned_in == SEARCH
