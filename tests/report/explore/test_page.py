"""What the controls of the page are answered with, and the page itself where Gradio is installed."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.presets import MODEL

from fedvlp.data.preprocessing import Preprocessing
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.report.explore import serve
from fedvlp.report.explore.content import FILMS, Explorer
from fedvlp.report.explore.page import Answers, _told, page


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    model = MODEL.build(3).eval()
    model.prepare = Preprocessing(36, 32)
    model.prompts = {"Edema": ("mild edema", "severe edema"), "Pneumonia": ("pneumonia",)}
    return Explorer.of(model, SyntheticCohort(sites=2, size=24, image_size=36).build())


@pytest.fixture
def answers(explorer: Explorer) -> Answers:
    return Answers(explorer)


@pytest.fixture
def upload(explorer: Explorer, tmp_path: Path) -> Path:
    """A film as Gradio stores it, in a folder of its own."""
    from PIL import Image

    file = tmp_path / "0123abcd" / "DOE_JANE.png"
    file.parent.mkdir()
    Image.fromarray(explorer.cohort.images(np.array([7]))[0]).save(file)
    return file


def test_the_head_counts(answers: Answers) -> None:
    assert "24 records: 24 images, 24 reports" in answers.head()


def test_a_phrase_and_then_where_the_model_looked(answers: Answers, explorer: Explorer) -> None:
    cards = answers.phrase("left effusion", 5.0)
    nearest = explorer.near_phrase("left effusion", 5)
    assert [cards.count(record.key) for record in nearest] == [1] * 5
    assert re.findall(r'data-index="(\d+)"', cards) == [str(record.index) for record in nearest]
    index = answers.clicked(SimpleNamespace(index=nearest[1].index))
    second = explorer.film_of(index)
    cosine = float(second.vector @ explorer.model.encode_text("left effusion"))
    assert f"cosine {cosine:+.3f};" in answers.looked_at(index, "left effusion")
    with pytest.raises(ValueError, match="click an image first"):
        answers.looked_at(None, "left effusion")


def test_an_image_is_viewed_as_its_file_has_it_and_its_name_is_for_its_owner(explorer: Explorer, upload: Path) -> None:
    """Whole and larger than it was decoded for training, in a window of grey levels; one that has gone as decoded."""
    from PIL import Image

    whole = np.tile(np.arange(200, dtype=np.uint8), (150, 1))
    Image.fromarray(whole).save(upload)
    files = (upload, *[None] * (len(explorer.cohort) - 1))
    known = replace(explorer, cohort=replace(explorer.cohort, files=files))
    assert known.original(0).shape == (150, 200)
    assert known.original(1).shape == (36, 36)
    assert Answers(known).viewed(None, 128, 255) == ""
    assert upload.name in Answers(known, names=True).viewed(0, 128, 255)
    assert upload.name not in Answers(known).viewed(0, 128, 255)
    assert known.cohort.take(np.array([0])).files == (upload,)
    upload.unlink()
    assert known.original(0).shape == (36, 36)


def test_a_dropped_film_leaves_no_file(answers: Answers, upload: Path, tmp_path: Path) -> None:
    film = answers.drop(str(upload))
    assert list(tmp_path.iterdir()) == []
    (_, first), shown, findings, similar, reports = answers.film(film, "", 3.0)
    assert first in ("Edema", "Pneumonia")
    assert "Edema" in findings
    assert "Pneumonia" in findings
    assert shown.count("<img") == 1
    assert similar.count('class="card"') == reports.count('class="card"') == 3
    assert "cosine +0.99" in similar or "cosine +1.000" in similar
    assert "DOE" not in shown + findings + similar + reports


def test_what_is_no_film_is_removed_too(answers: Answers, tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "DOE_JANE.txt").write_text("no film")
    with pytest.raises(ValueError, match="the image cannot be used: unsupported image format") as refused:
        answers.drop(str(tmp_path / "ab" / "DOE_JANE.txt"))
    assert "DOE" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="drop an image: PNG"):
        answers.drop(None)


def test_where_it_looked_for_a_phrase_or_for_the_first_class(answers: Answers, explorer: Explorer) -> None:
    film = explorer.film_of(7)
    dropped, *_ = answers.film(film, " rib fracture ,edema", 2.0)
    assert dropped[1] in ("rib fracture", "edema")
    assert f"For <b>{dropped[1]}</b>" in answers.looked(dropped, " ")
    assert "For <b>left effusion</b>" in answers.looked(dropped, "left effusion")
    for ask in (lambda: answers.film(None, "", 2), lambda: answers.looked(None, "edema")):
        with pytest.raises(ValueError, match="drop an image first"):
            ask()


def test_a_model_without_classes_still_finds_similar_films(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer.model, "prompts", {})
    answers = Answers(explorer)
    dropped, _, findings, similar, _ = answers.film(explorer.film_of(7), "", 2.0)
    assert "no classes of its own: give some" in findings
    assert similar.count('class="card"') == 2
    assert answers.looked(dropped, "") == ""


def test_records_without_reports_say_so(explorer: Explorer) -> None:
    silent = replace(explorer, reports=torch.full_like(explorer.reports, torch.nan))
    *_, reports = Answers(silent).film(explorer.film_of(7), "", 2.0)
    assert "no record there has a report" in reports


def test_the_space_and_a_point_of_it(answers: Answers, explorer: Explorer) -> None:
    drawing = answers.space(FILMS, "site")
    assert drawing.count("<title>") == 24
    assert "Images by site" in drawing
    assert explorer.cohort.reports[7][:60] in html.unescape(drawing)
    assert explorer.keys[7] in answers.point(SimpleNamespace(index=7))


def test_no_name_of_a_data_set_becomes_a_script_of_the_page(explorer: Explorer) -> None:
    """The names of labels stand in Gradio's settings, in a script of the page, all of whose scripts may run."""
    pytest.importorskip("gradio", reason="pip install 'fedvlp[app]'")
    from fastapi.testclient import TestClient

    names = ("</script><script>alert(1)</script>", *explorer.cohort.label_names[1:])
    hostile = replace(explorer, cohort=replace(explorer.cohort, label_names=names))
    with serve.own_folder():
        policies = []
        for shown in (explorer, hostile):
            answer = TestClient(serve.Guarded(page(shown)), base_url="http://127.0.0.1").get("/")
            assert answer.status_code == 200
            assert "<script>alert(1)" not in answer.text
            assert not re.search(r'(?:src|href)="(?:https?:)?//', answer.text)
            policies.append(answer.headers["content-security-policy"].count("sha256-"))
    assert policies[0] == policies[1] > 0


class RefusedError(Exception):
    """In the place of ``gradio.Error``."""

    def __init__(self, said: str, **options: Any) -> None:
        super().__init__(said)
        self.options = options


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("the phrase is empty"), "the phrase is empty"),
        (OSError(2, "No such file", "/home/doe_jane/film.png"), "this cannot be done (FileNotFoundError)"),
        (RuntimeError("/home/doe_jane/film.png"), "this cannot be done (RuntimeError)"),
    ],
)
def test_an_error_in_the_page_shows_no_path_and_the_terminal_none_either(error: Exception, said: str) -> None:
    def asked() -> None:
        raise error

    with pytest.raises(RefusedError) as refused:
        _told(SimpleNamespace(Error=RefusedError), asked)()
    assert str(refused.value).startswith(said)
    assert "doe" not in str(refused.value)
    assert refused.value.options == {"print_exception": False}
    assert refused.value.__suppress_context__
