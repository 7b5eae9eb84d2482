"""CheXpert, NIH ChestX-ray14 and Open-I as published: small fixtures, and the real tables where they are."""

from __future__ import annotations

import csv
import gzip
import tarfile
from pathlib import Path

import numpy as np
import pytest
from support.published import chexpert_row, openi_reports
from support.published import film as picture

from fedvlp.data.cohort import Cohort
from fedvlp.data.labels import CHEXPERT, common_findings, folded
from fedvlp.data.sources.openi import OpenISource, parse
from fedvlp.data.sources.tabular import CheXpertSource, NIHSource

TABLES = Path(__file__).parents[3].parent / "shared" / "data" / "real-tables"
FIVE = ("Pneumonia", "No Finding", "Fracture", "Edema", "Pleural Effusion")
nan = np.nan
AGREED = {
    "Atelectasis", "Cardiomegaly", "Consolidation", "Fracture", "Pleural Effusion", "Pneumonia", "Pneumothorax",
    "Support Devices",
}  # fmt: skip
"""Findings of Open-i on which its MeSH headings and a labeller of the reports hardly differ."""


def real(name: str) -> str:
    if not (TABLES / name).exists():
        pytest.skip(f"the real table {name} is not on this machine (../shared/data/real-tables)")
    return str(TABLES / name)


def table(path: Path, rows: list[dict[str, str]]) -> str:
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_chexpert_keeps_the_published_values_by_name(tmp_path: Path) -> None:
    """1, 0, -1 and blanks stay; laterals are left out; valid/ is val; one patient is in one split."""
    rows = [
        chexpert_row("C/train/patient00001/study1/view1_frontal.jpg", Pneumonia="1.0", Edema="-1.0", Fracture="0.0"),
        chexpert_row("C/train/patient00001/study1/view2_lateral.jpg", view="Lateral"),
        chexpert_row("C/valid/patient00002/study1/view1_frontal.jpg", **{"No Finding": "1.0"}),
    ]
    cohort = CheXpertSource(table(tmp_path / "train.csv", rows), labels=FIVE).build()
    expected = np.array([[1, nan, 0, -1, nan], [nan, 1, nan, nan, nan]], dtype=np.float32)
    np.testing.assert_array_equal(cohort.labels, expected)
    assert cohort.label_names == FIVE
    assert cohort.splits.tolist() == ["train", "val"]
    assert not cohort.has_image().any()
    assert not cohort.has_report().any()
    assert len(CheXpertSource(table(tmp_path / "t.csv", rows), frontal=False).build()) == 3


def test_chexpert_reads_images_and_survives_a_broken_one(tmp_path: Path) -> None:
    names = [f"C/train/patient0000{i}/study1/view1_frontal.jpg" for i in range(3)]
    for index, name in enumerate(names[:2]):
        picture(tmp_path / name, 50 * index)
    (tmp_path / names[2]).parent.mkdir(parents=True)
    (tmp_path / names[2]).write_bytes(b"no image")
    path = table(tmp_path / "train.csv", [chexpert_row(name, Edema="1.0") for name in names])
    cohort = CheXpertSource(path, root=str(tmp_path), image_size=32).build()
    assert len(cohort) == 2
    assert cohort.has_image().all()
    assert [int(image[16, 16]) for image in cohort.images(np.arange(2))] == pytest.approx([0, 50], abs=8)  # JPEG
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match="1 of 3 images are not under root"):
        CheXpertSource(path, root=str(tmp_path)).build()


def test_nih_maps_names_and_takes_the_published_test_list(tmp_path: Path) -> None:
    """Every film of a listed patient is tested on, so that no patient crosses splits."""
    rows = [
        {"Image Index": f"{patient}_{i}.png", "Finding Labels": found, "Patient ID": patient, "Follow-up #": str(i)}
        for patient, i, found in [("7", 0, "Effusion|Mass"), ("7", 1, "No Finding"), ("8", 0, "Pneumonia")]
    ]
    listed = tmp_path / "test_list.txt"
    listed.write_text("7_1.png\n")
    for row in rows:
        picture(tmp_path / "images_001" / "images" / row["Image Index"], 9)
    path = table(tmp_path / "entries.csv.gz", rows)
    fractions = {"val_fraction": 0.0, "test_fraction": 0.5}  # the published split is the split: none is drawn beside it
    for seed in range(4):
        cohort = NIHSource(
            path, str(tmp_path), test_list=str(listed), labels=FIVE, image_size=32, seed=seed, **fractions
        ).build()
        assert cohort.splits.tolist() == ["test", "test", "train"]
    expected = np.array([[0, 0, nan, 0, 1], [0, 1, nan, 0, 0], [1, 0, nan, 0, 0]], dtype=np.float32)
    np.testing.assert_array_equal(cohort.labels, expected)
    assert cohort.splits.tolist() == ["test", "test", "train"]
    (tmp_path / "images_001" / "images" / "8_0.png").unlink()
    with pytest.raises(ValueError, match="1 of 3 images are not under root"):
        NIHSource(path, str(tmp_path)).build()


def test_published_columns_of_people_are_subgroups(tmp_path: Path) -> None:
    """A table without them, as some copies are, has none that is known."""
    entry = {"Image Index": "1.png", "Finding Labels": "Mass", "Patient ID": "1", "Follow-up #": "0"}
    said = {"Patient Gender": "F", "Patient Age": "058Y", "View Position": "PA"}
    known, unknown = (
        NIHSource(table(tmp_path / f"{number}.csv", [row])).build() for number, row in enumerate([entry | said, entry])
    )
    assert known.subgroup_names == ("sex", "age", "view")
    assert known.subgroups.tolist() == [["F", "40-59", "PA"]]
    assert unknown.subgroup_names == ()
    film = chexpert_row("CheXpert-v1.0/train/patient00001/study1/view1_frontal.jpg")
    path = table(tmp_path / "train.csv", [film | {"Sex": "Male", "Age": "90", "AP/PA": "AP"}])
    assert CheXpertSource(path).build().subgroups.tolist() == [["M", "80+", "AP"]]


def test_subgroups_of_two_collections_meet_when_they_are_joined(tmp_path: Path) -> None:
    """Sexes, ages and views are called alike; a lateral film of CheXpert is lateral, not of an unknown view."""
    entries = [
        {"Image Index": f"{i}.png", "Finding Labels": "Mass", "Patient ID": str(i), "Follow-up #": "0",
         "Patient Gender": sex, "Patient Age": "058Y", "View Position": view}
        for i, (sex, view) in enumerate([("F", "PA"), ("M", "AP")])
    ]  # fmt: skip
    seen = [("Female", "Frontal", "PA"), ("Male", "Frontal", ""), ("Unknown", "Lateral", ""), ("Male", "Lateral", "LL")]
    films = [
        chexpert_row(f"C/train/patient0000{i}/study1/v.jpg", view) | {"Sex": sex, "Age": "58", "AP/PA": projection}
        for i, (sex, view, projection) in enumerate(seen)
    ]
    nih = NIHSource(table(tmp_path / "n.csv", entries)).build()
    chexpert = CheXpertSource(table(tmp_path / "train.csv", films), frontal=False).build()
    joined = Cohort.concat([nih.with_sites(["north"] * 2), chexpert.with_sites(["south"] * 4)])
    assert joined.subgroup("sex").tolist() == ["F", "M", "F", "M", "", "M"]
    assert set(joined.subgroup("age").tolist()) == {"40-59"}
    assert joined.subgroup("view").tolist() == ["PA", "AP", "PA", "frontal", "lateral", "lateral"]


@pytest.mark.parametrize("name", ["CheXpert-v1.0-small", "elsewhere"])
def test_chexpert_is_found_behind_links_of_any_name(name: str, tmp_path: Path) -> None:
    film = "CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg"
    kept = tmp_path / "disk" / "another name"
    picture(kept / film.partition("/")[2], 9)
    table(kept / "train.csv", [chexpert_row(film)])
    (tmp_path / name).symlink_to(kept)
    folders = [tmp_path / name, kept] + ([tmp_path] if name in film else [])
    assert [len(CheXpertSource.at(folder, image_size=32).build()) for folder in folders] == [1] * len(folders)
    (tmp_path / "as published").mkdir()
    (tmp_path / "as published" / "CheXpert-v1.0-small").symlink_to(kept)
    path = str(kept / "train.csv")
    assert len(CheXpertSource(path, root=str(tmp_path / "as published"), image_size=32).build()) == 1


def test_openi_reads_impression_findings_and_headings(tmp_path: Path) -> None:
    cohort = OpenISource(str(openi_reports(tmp_path / "xml")), labels=FIVE).build()
    assert cohort.reports[0] == "left lower pneumonia opacity in the left base"
    expected = np.array([[1, 0, 0, 0, 1], [nan] * 5], dtype=np.float32)
    np.testing.assert_array_equal(cohort.labels, expected)
    assert not cohort.has_image().any()


def test_openi_archive_and_folder_are_the_same_cohort(tmp_path: Path) -> None:
    folder = openi_reports(tmp_path / "xml")
    with tarfile.open(tmp_path / "reports.tgz", "w:gz") as archive:
        archive.add(folder, "ecgen-radiology")
    one, other = OpenISource(str(tmp_path / "reports.tgz")).build(), OpenISource(str(folder)).build()
    assert one.fingerprint == other.fingerprint


def openi_films(folder: Path) -> tuple[str, str]:
    """Five films of two worded reports, one of them under its longer name, and a worded report without an image."""
    reports = openi_reports(folder / "xml")
    films = {"0.xml": ["CXR1_1_IM-0001-3001", "CXR1_1_IM-0001-4001", "CXR1_IM-2"], "1.xml": ["CXR2_IM-3", "CXR2_IM-4"]}
    for number, (file, names) in enumerate(films.items(), start=1):
        text = (reports / file).read_text()
        images = "".join(f'<parentImage id="{name}"/>' for name in names)
        (reports / file).write_text(text.replace(f'<parentImage id="CXR{number}_IM-1"/>', images))
        for index, name in enumerate(names):
            picture(folder / "png" / f"{name}.png", 20 * number + index)
    third = (reports / "2.xml").read_text().replace('"IMPRESSION"></', '"IMPRESSION">No acute disease seen.</')
    (reports / "2.xml").write_text(third.replace('<parentImage id="CXR3_IM-1"/>', ""))
    return str(reports), str(folder / "png")


def projections(path: Path) -> str:
    """Four of the five films, as Kaggle names them."""
    rows = [
        ("1", "1_IM-0001-4001.dcm.png", "Frontal"), ("1", "1_IM-0001-3001.dcm.png", "Lateral"),
        ("1", "1_IM-2.dcm.png", "Frontal"), ("2", "2_IM-3.dcm.png", "Lateral"),
    ]  # fmt: skip
    return table(path, [dict(zip(("uid", "filename", "projection"), row, strict=True)) for row in rows])


def test_openi_with_films_has_a_row_for_each_frontal_one(tmp_path: Path) -> None:
    reports, films = openi_films(tmp_path)
    views = projections(tmp_path / "indiana_projections.csv")
    cohort, summary = OpenISource(reports, films, views, image_size=32).prepare()
    assert cohort.images(np.arange(2))[:, 16, 16].tolist() == [21, 22]
    assert cohort.subgroup("view").tolist() == ["frontal", "frontal"]
    assert summary == {
        "rows": 6, "used": 2, "patients": 1, "skipped: report empty or too short": 0,
        "skipped: report without an image": 1, "skipped: image of another or an unknown view": 3,
        "skipped: image not under root": 0,
    }  # fmt: skip
    both = OpenISource(reports, films, views, ("Frontal", "Lateral"), image_size=32).build()
    assert both.subgroup("view").tolist() == ["lateral", "frontal", "frontal", "lateral"]
    with pytest.raises(ValueError, match="1 of the views are none of Frontal, Lateral"):
        OpenISource(reports, films, views, "Frontal,frontal").build()


def test_openi_without_the_table_of_views_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reports, films = openi_films(tmp_path)
    cohort, summary = OpenISource(reports, films, image_size=32).prepare()
    assert len(cohort) == 5
    assert cohort.subgroup_names == ()
    assert summary["images of unknown view (no indiana_projections.csv)"] == 5
    assert "5 images of unknown view (no indiana_projections.csv); lateral ones are among them" in caplog.text
    assert "images of unknown view (no indiana_projections.csv)" not in OpenISource(reports).prepare()[1]


def test_openi_finds_the_table_of_views_in_its_folder(tmp_path: Path) -> None:
    reports, films = openi_films(tmp_path)
    Path(reports).rename(tmp_path / "ecgen-radiology")
    Path(films).rename(tmp_path / "NLMCXR_png")
    assert "projections" not in OpenISource.layout(tmp_path)
    projections(tmp_path / "indiana_projections.csv")
    assert len(OpenISource.at(tmp_path, image_size=32).build()) == 2


def test_openi_refuses_a_folder_that_lacks_films_unless_a_part_of_them_is_enough(tmp_path: Path) -> None:
    reports, films = openi_films(tmp_path)
    (tmp_path / "png" / "CXR2_IM-3.png").unlink()
    for most in (0, 0.19):
        with pytest.raises(ValueError, match=r"1 of 5 images are not under root.* max_missing=0\.2 "):
            OpenISource(reports, films, max_missing=most).build()
    cohort, summary = OpenISource(reports, films, max_missing=0.2, image_size=32).prepare()
    assert len(cohort) == 4
    assert summary["skipped: image not under root"] == 1
    assert cohort.has_image().all()
    assert cohort.has_report().all()
    views = projections(tmp_path / "indiana_projections.csv")
    assert len(OpenISource(reports, films, views, image_size=32).build()) == 2, "a lateral film is not needed"


def test_openi_headings_count_with_their_first_qualifier() -> None:
    majors = "".join(f"<major>{text}</major>" for text in ("Thickening/pleura/left", "Cardiac Shadow/enlarged/mild"))
    report = parse(f'<eCitation><uId id="CXR1"/><MeSH>{majors}</MeSH></eCitation>'.encode())
    assert report.headings == {"thickening", "thickening/pleura", "cardiac shadow", "cardiac shadow/enlarged"}


@pytest.mark.parametrize("kind", [CheXpertSource, NIHSource])
def test_missing_columns_are_named_and_nothing_of_the_file_is(kind: type, tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [{"Doe^Canary": "1", "Path": "x", "Image Index": "x"}])
    with pytest.raises(ValueError, match="the table lacks") as caught:
        kind(path).build()
    assert "Canary" not in str(caught.value)
    with pytest.raises(ValueError, match="not a file"):
        kind(str(tmp_path / "none.csv")).build()


def test_a_strange_path_or_report_is_refused_without_its_text(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [chexpert_row("C/train/Canary^Doe.jpg")])
    with pytest.raises(ValueError, match="1 of 1 values of Path") as caught:
        CheXpertSource(path).build()
    assert "Canary" not in str(caught.value)
    for xml in (b"<canary", b"<eCitation>canary</eCitation>"):
        with pytest.raises(ValueError, match="openi source") as caught:
            parse(xml)
        assert "canary" not in str(caught.value)
    with pytest.raises(ValueError, match="neither"):
        OpenISource(str(tmp_path / "none")).build()


@pytest.mark.slow(seconds=20)
def test_the_real_chexpert_table() -> None:
    """223,414 rows (spec 11); 191,027 of them frontal; pneumonia as published: 6,039 positive, 18,770 uncertain."""
    cohort = CheXpertSource(real("chexpert_train.csv.gz"), frontal=False).build()
    assert len(cohort) == 223_414
    assert len(set(cohort.patients)) == 64_540
    pneumonia = cohort.labels[:, CHEXPERT.index("Pneumonia")]
    assert ((pneumonia == 1).sum(), (pneumonia == -1).sum()) == (6_039, 18_770)


@pytest.mark.slow(seconds=10)
def test_the_real_nih_table() -> None:
    """112,120 images of 30,805 patients (spec 11), 60,361 of them without a finding."""
    cohort = NIHSource(real("Data_Entry_2017_v2020.csv.gz")).build()
    assert (len(cohort), len(set(cohort.patients))) == (112_120, 30_805)
    assert (cohort.labels[:, CHEXPERT.index("No Finding")] == 1).sum() == 60_361


@pytest.mark.slow(seconds=10)
def test_the_indexers_of_openi_agree_with_a_labeller_of_its_reports() -> None:
    """Finding by finding, on the reports that both have: Cohen's kappa, and how many reports a finding has at each."""
    with Path(real("openi_labels.csv")).open(encoding="utf-8", newline="") as file:
        labelled = {row["study"]: {folded(word) for word in row["labels"].split("|")} for row in csv.DictReader(file)}
    listing = OpenISource(real("NLMCXR_reports.tgz")).listing()
    assert len(listing.keys) == 3_927
    assert listing.files is None
    rows = [row for row, key in enumerate(listing.keys) if key in labelled and not np.isnan(listing.labels[row]).all()]
    words, kappas = common_findings(), {}
    for column, name in enumerate(listing.names):
        indexed = listing.labels[rows, column]
        told = np.array([any(name in words[word] for word in labelled[listing.keys[row]]) for row in rows])
        if not np.isnan(indexed).any():
            kappas[name] = kappa(indexed == 1, told)
    assert len(rows) == 3_568
    assert {name for name, value in kappas.items() if value > 0.9} == AGREED
    assert all(value > 0.4 for value in kappas.values()), kappas


def kappa(one: np.ndarray, other: np.ndarray) -> float:
    """Cohen's, of two judgements [N] bool: agreement beyond what their rates would give."""
    expected = one.mean() * other.mean() + (1 - one.mean()) * (1 - other.mean())
    return float(((one == other).mean() - expected) / (1 - expected))


@pytest.mark.slow(seconds=15)
def test_the_real_openi_reports() -> None:
    """3,955 reports, 28 of them without findings and impression; 1,391 indexed as normal."""
    source = OpenISource(real("NLMCXR_reports.tgz"), min_report_words=0)
    found = list(source.reports())
    assert len(found) == 3_955
    assert sum(not (r.sections.get("FINDINGS") or r.sections.get("IMPRESSION")) for r in found) == 28
    assert sum("normal" in (r.headings or ()) for r in found) == 1_391
    cohort = OpenISource(source.path, labels=("No Finding", "Pneumonia")).build()
    assert len(cohort) <= 3_955 - 28
    assert 40 <= (cohort.labels[:, 1] == 1).sum() <= 43
    assert cohort.has_report().all()
