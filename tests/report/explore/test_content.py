"""What the page of a model shows: the nearest first, findings against the data set, sites and labels in the plane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.presets import MODEL

from fedvlp.data.cohort import Cohort
from fedvlp.data.preprocessing import Preprocessing
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.evaluation.attribution import attribution
from fedvlp.models import DualEncoder, MultimodalConfig
from fedvlp.models.findings import FindingHeads
from fedvlp.report.explore import content, pictures
from fedvlp.report.explore.content import FILMS, REPORTS, Explorer
from fedvlp.run.finding_probe import pooled
from fedvlp.run.search import search


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    built = MODEL.build(3).eval()
    built.prepare = Preprocessing(36, 32)
    built.prompts = {"Edema": ("mild edema", "severe edema"), "Pneumonia": ("pneumonia",)}
    return built


@pytest.fixture(scope="module")
def cohort() -> Cohort:
    """24 films; the first has no report, and the second no film."""
    table = SyntheticCohort(sites=2, size=24, image_size=36).build()
    lost = np.arange(24)
    return table.without(lost == 0, lost == 1)


@pytest.fixture(scope="module")
def explorer(model: DualEncoder, cohort: Cohort) -> Explorer:
    return Explorer.of(model, cohort)


def by_hand(explorer: Explorer) -> Explorer:
    """The same records with vectors in the plane: films at 0, 10, 20 ... degrees, reports at 0, 15, 30 ... degrees."""
    films, reports = (torch.deg2rad(torch.arange(24.0) * step) for step in (10, 15))
    return replace(
        explorer,
        films=torch.stack([films.cos(), films.sin()], 1),
        reports=torch.stack([reports.cos(), reports.sin()], 1),
    )


def test_heads_beside_the_model_say_how_likely_a_finding_is_and_what_that_is_worth(explorer: Explorer) -> None:
    """Likely ones first; a head whose interval reaches 0.5 is no better than chance, and zero-shot says so too."""
    film = explorer.film_of(0)
    assert explorer.stated(film) == []
    width = pooled(explorer.model, film.prepared[None]).shape[1]
    figures = {"b": {"test_auc": 0.9, "test_low": 0.8, "test_high": 0.95, "threshold": 0.5}, "a": {"auc": 0.45}}
    heads = FindingHeads(("a", "b"), torch.zeros(2, width), torch.tensor([-1.0, 1.0]), "", figures)
    stated = replace(explorer, heads=heads).stated(film)
    assert [(name, round(value, 4), known) for name, value, known in stated] == [
        ("b", 0.7311, figures["b"]),
        ("a", 0.2689, figures["a"]),
    ]
    shown = pictures.stated(stated)
    row = '<tr><td>{}</td><td class="number">{}</td><td>{}</td><td>{}</td></tr>'
    assert (
        row.format("b", "0.73", "yes", "0.90 [0.80, 0.95]") + row.format("a", "0.27", "", "0.45, no better than chance")
        in shown
    )
    found = explorer.findings(film)
    assert pictures.CHANCE not in pictures.findings(found, 23)
    assert pictures.CHANCE in pictures.findings(found, 23, chance=True)


def test_a_phrase_finds_what_search_finds(model: DualEncoder, cohort: Cohort, explorer: Explorer) -> None:
    records = explorer.near_phrase(" left basal effusion ", 5)
    expected = search(model, cohort, model.encode_text("left basal effusion"), top=5)
    assert [record.key for record in records] == [one.key for one in expected]
    assert [record.cosine for record in records] == pytest.approx([one.similarity for one in expected], abs=1e-6)
    for record in records:
        row = cohort.ids.index(record.key)
        assert (record.report, record.split) == (cohort.reports[row], cohort.splits[row])
        assert record.site == (cohort.sites or ())[row]
        assert np.array_equal(record.pixels, cohort.images(np.array([row]))[0])


def test_the_nearest_are_first_and_lie_where_they_should(explorer: Explorer) -> None:
    """At 30 degrees the third film lies, beside it those of 20 and 40; of the reports the second."""
    turned = by_hand(explorer)
    query = torch.tensor([np.cos(np.pi / 6), np.sin(np.pi / 6)], dtype=torch.float32)
    assert [record.index for record in turned.near(query, 1)] == [3]
    assert sorted(record.index for record in turned.near(query, 3)) == [2, 3, 4]
    assert [record.index for record in turned.near(query, 1, REPORTS)] == [2]
    assert turned.near(query, 2)[1].cosine == pytest.approx(np.cos(np.pi / 18))


def test_a_record_without_a_film_or_a_report_is_never_near(explorer: Explorer) -> None:
    query = explorer.films[5]
    assert {record.index for record in explorer.near(query, 99)} == set(range(24)) - {1}
    reports = explorer.near(query, 99, REPORTS)
    assert {record.index for record in reports} == set(range(1, 24))
    (without,) = (record for record in reports if record.index == 1)
    assert without.pixels is None
    assert without.report


def test_labels_are_told_with_a_question_mark_where_they_are_uncertain(explorer: Explorer) -> None:
    labels = np.full((24, 3), np.nan, dtype=np.float32)
    labels[5] = (1, 0, -1)
    told = replace(explorer, cohort=replace(explorer.cohort, labels=labels, label_names=("a", "b", "c")))
    (record,) = told.near(told.films[5], 1)
    assert record.labels == ("a", "c?")


def test_a_film_of_the_data_set_is_nearest_to_itself(explorer: Explorer) -> None:
    film = explorer.film_of(7)
    (first, second) = explorer.near(film.vector, 2)
    assert first.index == 7
    assert first.cosine == pytest.approx(1.0, abs=1e-5)
    assert second.cosine < first.cosine
    with pytest.raises(ValueError, match="this record has no image"):
        explorer.film_of(1)


def test_one_record(explorer: Explorer) -> None:
    record = explorer.record(7)
    assert (record.index, record.key, record.report) == (7, explorer.keys[7], explorer.cohort.reports[7])
    assert np.isnan(record.cosine)
    for index in (-1, 24):
        with pytest.raises(ValueError, match=f"there is no record {index}; expected 0 to 23"):
            explorer.record(index)


def test_findings_say_how_many_films_are_less_like_a_class(explorer: Explorer, model: DualEncoder) -> None:
    film = explorer.film_of(7)
    findings = explorer.findings(film)
    assert {one.name for one in findings} == {"Edema", "Pneumonia"}
    assert [one.below for one in findings] == sorted((one.below for one in findings), reverse=True)
    scores = [model.zero_shot(explorer.film_of(row).prepared) for row in range(24) if row != 1]
    own = model.zero_shot(film.prepared)
    for one in findings:
        assert one.cosine == pytest.approx(own[one.name], abs=1e-6)
        less = sum(score[one.name] < own[one.name] - 1e-6 for score in scores)
        assert one.below == pytest.approx(less / 23, abs=1e-9)


def test_classes_of_a_persons_own(explorer: Explorer) -> None:
    film = explorer.film_of(7)
    (one,) = explorer.findings(film, ["rib fracture"])
    assert one.name == "rib fracture"
    assert one.cosine == pytest.approx(float(film.vector @ explorer.model.encode_text("rib fracture")), abs=1e-6)


def test_where_it_looked_is_what_explain_draws(explorer: Explorer, model: DualEncoder, cohort: Cohort) -> None:
    film = cohort.images(np.array([7]))[0]
    result = explorer.looked(explorer.film(film), "left effusion")
    expected = attribution(model, film, "left effusion")
    assert torch.equal(result.added, expected.added)
    assert result.cosine == expected.cosine


def test_a_film_from_a_file_holds_no_name_of_it(explorer: Explorer, tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "DOE_JANE.png"
    Image.fromarray(explorer.cohort.images(np.array([7]))[0]).save(file)
    film = explorer.film(file)
    file.unlink()
    assert film.vector @ explorer.films[7] > 0.99  # a file's levels are stretched, those of a drawing are not
    assert "DOE" not in repr(vars(film))
    (tmp_path / "DOE_JANE.txt").write_text("no film")
    with pytest.raises(ValueError, match="the image cannot be used: unsupported image format") as refused:
        explorer.film(tmp_path / "DOE_JANE.txt")
    assert "DOE" not in str(refused.value)


def test_the_plane_by_hand(explorer: Explorer) -> None:
    """Films at (x, 0) with x = 0..23 but for two at (11.5, +-1): the first axis is x, and has nearly all variance."""
    films = torch.stack([torch.arange(24.0), torch.zeros(24)], 1)
    films[0], films[23] = torch.tensor([11.5, 1.0]), torch.tensor([11.5, -1.0])
    plane = replace(explorer, films=films).projection(FILMS, "split")
    expected = films.double().numpy() - [11.5, 0]
    assert np.abs(np.abs(plane.points) - np.abs(expected)).max() < 1e-9
    along = float((expected[:, 0] ** 2).sum())
    assert plane.shares == pytest.approx((along / (along + 2), 2 / (along + 2)))
    assert plane.indices == tuple(range(24))
    assert plane.groups == tuple(explorer.cohort.splits)


def test_the_plane_is_coloured_by_site_and_by_label(explorer: Explorer) -> None:
    assert explorer.colourings[:3] == ["site", "split", explorer.cohort.label_names[0]]
    sites = explorer.projection(FILMS, "site")
    assert sites.total == len(sites.indices) == 23
    assert sites.groups == tuple((explorer.cohort.sites or ())[row] for row in sites.indices)
    name = explorer.cohort.label_names[0]
    states = {1.0: "present", 0.0: "absent", -1.0: "uncertain"}
    labels = explorer.projection(REPORTS, name)
    assert labels.groups == tuple(
        states.get(float(explorer.cohort.labels[row, 0]), "not mentioned") for row in labels.indices
    )
    assert len(set(labels.groups)) > 1
    without = replace(explorer, cohort=replace(explorer.cohort, sites=None))
    assert without.colourings[0] == "split"
    assert without.near(explorer.films[5], 1)[0].site == ""


def test_a_large_data_set_is_drawn_by_lot_and_always_alike(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "POINTS", 10)
    plane = explorer.projection(FILMS, "site")
    assert (len(plane.indices), plane.total) == (10, 23)
    assert list(plane.indices) == sorted(set(plane.indices))
    assert 1 not in plane.indices
    assert plane.indices == explorer.projection(FILMS, "split").indices


def test_one_split_alone(model: DualEncoder, cohort: Cohort) -> None:
    test = Explorer.of(model, cohort, "test")
    assert len(test) == (cohort.splits == "test").sum() == len(test.keys)
    assert {record.split for record in test.near_phrase("edema", 99)} == {"test"}


def test_keys_of_private_records_are_hashed(model: DualEncoder, cohort: Cohort) -> None:
    private = Explorer.of(model, replace(cohort, private=True))
    assert not set(private.keys) & set(cohort.ids)
    assert all(len(key) == 32 for key in private.keys)


def test_what_cannot_be_shown_is_refused_in_a_sentence(model: DualEncoder, cohort: Cohort, explorer: Explorer) -> None:
    classifier = MultimodalConfig(**{**vars(MODEL), "labels": ("a",)}).build(0)
    with pytest.raises(ValueError, match="explore: a MultimodalClassifier compares no images with texts"):
        Explorer.of(classifier, cohort)
    with pytest.raises(ValueError, match="explore: no record there has an image"):
        Explorer.of(model, cohort.without(np.zeros(24, bool), np.ones(24, bool)))
    with pytest.raises(ValueError, match="unknown split 'tset'"):
        Explorer.of(model, cohort, "tset")
    with pytest.raises(ValueError, match="the phrase is empty"):
        explorer.near_phrase("  ", 3)
    with pytest.raises(ValueError, match="the phrase is empty"):
        explorer.looked(explorer.film_of(7), "")
    with pytest.raises(ValueError, match="unknown colour 'sex'; there are: site, split"):
        explorer.projection(FILMS, "sex")
    none = replace(explorer, reports=torch.full_like(explorer.reports, torch.nan))
    with pytest.raises(ValueError, match="a projection needs at least 3 reports, and the data set has 0 here"):
        none.projection(REPORTS, "site")
