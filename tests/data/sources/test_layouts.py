"""Every collection from the folder that it was published in: what is read, what is missing, how it is split."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import cases
from support.laboratory import OUR_SOURCES, SOURCES
from support.published import COLLECTIONS, chexpert_row, film, openi_of_kaggle, table

from fedvlp.data import images
from fedvlp.data.sources.listed import by_patient
from fedvlp.data.sources.openi import OpenISource
from fedvlp.data.sources.tabular import CheXpertSource, COVIDxSource, NIHSource
from studies.collections.retina import BRSETSource, MBRSETSource

ITEMS = {
    "mimic_cxr": "mimic-cxr-2.0.0-metadata.csv, mimic-cxr-2.0.0-split.csv, mimic-cxr-2.0.0-chexpert.csv, files",
    "chexpert": "CheXpert-v1.0 or CheXpert-v1.0-small",
    "nih_cxr14": "Data_Entry_2017_v2020.csv or Data_Entry_2017.csv",
    "candid_ptx": "Pneumothorax_reports.csv",
    "openi": "NLMCXR_reports.tgz or ecgen-radiology or indiana_reports.csv",
    "padchest": "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv",
    "chexpert_plus": "df_chexpert_plus_240401.csv",
    "vindr_cxr": "annotations or train.csv, train",
    "rsna": "stage_2_train_labels.csv, stage_2_train_images",
    "covidx": f"{COVIDxSource.published_as['path']}, {COVIDxSource.published_as['test_list']}, train, test",
    "covid_radiography": "Normal, Viral Pneumonia, COVID, Lung_Opacity",
    "messidor": "Base11, Base12, Base13, Base14, Base21, Base22, Base23, Base24, Base31, Base32, Base33, Base34",
    "brset": "labels_brset.csv, fundus_photos",
    "mbrset": "labels_mbrset.csv, images",
    "siim": "train-rle.csv or stage_2_train.csv, dicom-images-train or stage_2_images",
    "chest_imagenome": "silver_dataset, files",
    "ehrxqa": "mimiccxrvqa/dataset or dataset, files",
    "vqa_v2": "v2_OpenEnded_mscoco_train2014_questions.json, v2_mscoco_train2014_annotations.json, "
    "v2_OpenEnded_mscoco_val2014_questions.json, v2_mscoco_val2014_annotations.json, train2014, val2014",
    "coco_captions": "dataset_coco.json, train2014 or allimages, val2014 or allimages",
    "flickr30k": "dataset_flickr30k.json, flickr30k-images or flickr30k_images",
    "cifar100": "train.bin, test.bin, fine_label_names.txt",
    "ag_news": "train.csv, test.csv",
}
USED = {
    "mimic_cxr": 4, "chexpert": 8, "nih_cxr14": 12, "candid_ptx": 3, "openi": 2, "rsna": 4, "covidx": 11,
    "covid_radiography": 8, "messidor": 23, "brset": 12, "mbrset": 10, "siim": 10, "padchest": 5, "chexpert_plus": 5,
    "vindr_cxr": 6, "chest_imagenome": 2, "ehrxqa": 4, "vqa_v2": 18, "coco_captions": 30, "flickr30k": 30,
    "cifar100": 12, "ag_news": 12,
}  # fmt: skip


def at(name: str, root: Path, **settings: Any) -> Any:
    """The source in a folder with its fixture."""
    if not root.exists():
        root.mkdir()
        COLLECTIONS[name](root)
    return SOURCES[name].at(root, image_size=32, **settings)  # type: ignore[union-attr]


def test_every_published_source_has_a_fixture() -> None:
    assert COLLECTIONS.keys() == ITEMS.keys() == USED.keys() == SOURCES.keys() - {"table"}


@pytest.mark.parametrize("name", cases(COLLECTIONS, often=OUR_SOURCES))
def test_a_collection_is_read_from_its_folder_with_its_images(name: str, tmp_path: Path) -> None:
    """Every record has an image, but for texts, and no name of a record or a patient comes out."""
    cohort, summary = at(name, tmp_path / "root").prepare()
    assert len(cohort) == summary["used"] == USED[name]
    assert summary["rows"] == USED[name] + sum(count for reason, count in summary.items() if "skipped" in reason)
    pictured = name != "ag_news"
    assert set(cohort.has_image()) == {pictured}
    brightest = cohort.images(np.arange(len(cohort))).reshape(len(cohort), -1).max(axis=1)
    assert brightest.min() > 220 or not pictured  # of 240; JPEG is not exact
    said = str((cohort.ids, cohort.patients, cohort.studies))
    assert not [key for key in ("10000032", "patient0", "1.2.3", "img0", "cohen", "CXR1") if key in said]


def test_all_that_a_folder_lacks_is_listed(tmp_path: Path) -> None:
    for name in COLLECTIONS:
        with pytest.raises(ValueError, match=f"{name} source: the root lacks") as caught:
            at(name, tmp_path)
        assert f"published items: {ITEMS[name]}; give" in str(caught.value)
        assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "removed", "said"),
    [
        ("chexpert", "CheXpert-v1.0-small/train.csv", "lacks 1 of 1 published items: train.csv"),
        ("chexpert", "CheXpert-v1.0-small/train/patient00001", "1 of 8 images are not under root"),
        ("nih_cxr14", "images_001/images/3_0.png", "1 of 12 images are not under root"),
        ("covidx", "train/t3.png", "1 of 11 images are not under root"),
        ("covid_radiography", "COVID/images", "no .png is in COVID"),
        ("messidor", "Base21/Annotation_Base21.csv", "Annotation_<folder>.csv is not in Base21; save each published"),
        ("messidor", "Base22/20050101_51_0100_PP.tif", "skipped"),
        ("mbrset", "images/1.1.jpg", "1 of 10 images are not under root"),
        ("chest_imagenome", "silver_dataset/splits/valid.csv", "lacks 1 of 4 published items: valid.csv"),
        ("chest_imagenome", "silver_dataset/scene_graph/b1_SceneGraph.json", "1 of 4 scene graphs are not in"),
        ("ehrxqa", "mimiccxrvqa/dataset/test.json", "lacks 1 of 3 published items: test.json"),
        ("siim", "dicom-images-train/1.2.4", "1 of 10 images are not under root"),
        ("vqa_v2", "v2_mscoco_val2014_annotations.json", "lacks 1 of 6 published items: v2_mscoco_val2014_annotations"),
        ("vqa_v2", "val2014/COCO_val2014_000000000103.jpg", "1 of 18 images are not under root"),
        ("coco_captions", "val2014/coco_004.jpg", "1 of 6 images are not under root"),
        ("flickr30k", "flickr30k-images/flickr30k_000.jpg", "1 of 6 images are not under root"),
        ("cifar100", "test.bin", "lacks 1 of 3 published items: test.bin"),
        ("ag_news", "train.csv", "lacks 1 of 2 published items: train.csv"),
    ],
)
def test_what_is_missing_within_is_counted_or_named(name: str, removed: str, said: str, tmp_path: Path) -> None:
    at(name, tmp_path / "root")
    gone = tmp_path / "root" / removed
    if said == "skipped":
        gone = next(gone.parent.glob("*1_0100_PP.tif"))
        said = "1 of 23 images are not under root"
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(ValueError, match=said):
        at(name, tmp_path / "root").build()


PARTIAL = ("mimic_cxr", "nih_cxr14", "chexpert", "rsna", "siim", "candid_ptx", "openi", "mbrset", "vqa_v2", "ehrxqa",
           "padchest", "chexpert_plus", "vindr_cxr", "brset")  # fmt: skip


@pytest.mark.parametrize("name", cases(PARTIAL, often=("mimic_cxr", "chexpert", "siim", "openi")))
def test_a_part_of_a_collection_is_taken_with_the_share_that_its_refusal_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every second image, none is there. What the summary counts as absent is what the cohort lacks."""
    whole = at(name, tmp_path / "root").build()
    monkeypatch.setattr(BRSETSource, "without_file", 0)  # of its published table 7 rows have none
    pictures = [file for file in (tmp_path / "root").rglob("*") if file.suffix in (".png", ".jpg", ".dcm", ".dicom")]
    for picture in sorted(pictures)[::2]:
        picture.unlink()
    with pytest.raises(ValueError, match="images are not under root") as caught:
        at(name, tmp_path / "root").screen()
    share = re.search(r"max_missing=([0-9.]+)", str(caught.value))
    assert share
    cohort, summary = at(name, tmp_path / "root", max_missing=float(share[1])).prepare()
    assert 0 < len(cohort) < len(whole)
    assert set(cohort.ids) < set(whole.ids)
    assert summary["rows"] == len(cohort) + sum(count for reason, count in summary.items() if "skipped" in reason)
    assert sum(count for reason, count in summary.items() if "not under root" in reason) >= len(whole) - len(cohort)


def test_padchest_has_spanish_reports_and_its_own_terms(tmp_path: Path) -> None:
    """By hand: the frontal films are 1, 3, ... 9; two have no labels at all, and the age is 2014 - 1950."""
    cohort = at("padchest", tmp_path / "root", labels="Pneumothorax,Cardiomegaly,No Finding").build()
    assert cohort.reports[:2] == ("cambi pulmonar cronic sever", "derram pleural izquierd cardiomegali")
    expected = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [np.nan] * 3, [np.nan] * 3]
    np.testing.assert_array_equal(cohort.labels, expected)
    assert cohort.subgroups.tolist() == [["F", "60-79", "PA"]] * 5
    flat = tmp_path / "flat"
    shutil.copytree(tmp_path / "root", flat)
    for file in flat.glob("[01]/*.png"):
        file.rename(flat / file.name)
    for folder in "01":
        (flat / folder).rmdir()
    assert SOURCES["padchest"].at(flat, image_size=32).build().ids == cohort.ids


def test_chexpert_plus_has_impression_and_findings_and_chexberts_labels(tmp_path: Path) -> None:
    cohort = at("chexpert_plus", tmp_path / "root", labels="Edema").build()
    assert cohort.reports[:2] == ("no acute disease", "no acute disease the lungs are clear")
    np.testing.assert_array_equal(cohort.labels[:, 0], [np.nan, 1, np.nan, 1, 1])
    assert cohort.splits.tolist()[-1] == "val"
    assert len(at("chexpert_plus", tmp_path / "root", frontal=False).build()) == 6
    (tmp_path / "root" / "chexbert_labels" / "impression_fixed.json").write_text("[1]\n")
    with pytest.raises(ValueError, match="labelled is no list of labels"):
        at("chexpert_plus", tmp_path / "root").build()


def test_vindr_has_the_classes_of_its_radiologists_or_of_its_boxes(tmp_path: Path) -> None:
    """What one of three radiologists says counts. Kaggle's table has boxes alone, and no class Pneumonia."""
    wanted = "Cardiomegaly,Aortic enlargement,Pneumonia,No Finding,Fracture"
    cohort = at("vindr_cxr", tmp_path / "root", labels=wanted).build()
    unknown = np.nan
    expected = [[0, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 1, 0]]
    np.testing.assert_array_equal(cohort.labels, [[*row, unknown] for row in expected])
    assert cohort.splits.tolist()[-2:] == ["test", "test"]
    boxes = [("f0", "No finding", 14), ("f1", "Cardiomegaly", 3), ("f1", "Aortic enlargement", 0)]
    shutil.rmtree(tmp_path / "root" / "annotations")
    table(tmp_path / "root" / "train.csv", "image_id,class_name,class_id", boxes)
    drawn = at("vindr_cxr", tmp_path / "root", labels=wanted).build()
    np.testing.assert_array_equal(drawn.labels, [[0, 0, unknown, 1, unknown], [1, 1, unknown, 0, unknown]])


def test_kaggles_copy_of_openi_is_openi(tmp_path: Path) -> None:
    """Two tables in place of XML: the same patients, texts and headings, and its frontal films."""
    openi_of_kaggle(tmp_path / "kaggle")
    cohort, summary = SOURCES["openi"].at(tmp_path / "kaggle", image_size=32, labels="Pneumonia,Edema").prepare()
    assert cohort.reports == ("left pneumonia opacity left", "no acute disease seen")
    np.testing.assert_array_equal(cohort.labels, [[1, 0], [np.nan, np.nan]])
    assert summary["skipped: image of another or an unknown view"] == 2
    assert set(cohort.patients) == set(at("openi", tmp_path / "root").build().patients)
    (tmp_path / "kaggle" / "indiana_projections.csv").unlink()
    with pytest.raises(ValueError, match=r"give projections=indiana_projections\.csv"):
        SOURCES["openi"].at(tmp_path / "kaggle").build()


def test_mimic_is_read_from_the_two_downloads_that_it_is(tmp_path: Path) -> None:
    """Films and tables are one, reports another; a folder with both is read as it is, and so are two given by hand."""
    whole = at("mimic_cxr", tmp_path / "root").build()
    films, texts = (tmp_path / "both" / name / "2.0.0" for name in ("mimic-cxr-jpg", "mimic-cxr"))
    films.parent.mkdir(parents=True)
    (tmp_path / "root").rename(films)
    for report in films.rglob("s*.txt"):
        (texts / report.relative_to(films)).parent.mkdir(parents=True, exist_ok=True)
        report.rename(texts / report.relative_to(films))
    assert SOURCES["mimic_cxr"].at(tmp_path / "both", image_size=32).build().fingerprint == whole.fingerprint
    by_hand = SOURCES["mimic_cxr"].at(films, image_size=32, reports=str(texts))
    assert by_hand.build().fingerprint == whole.fingerprint


def test_the_first_folder_of_mimic_is_a_part_of_it(tmp_path: Path) -> None:
    """Films and reports of other patients are not there."""
    whole = at("mimic_cxr", tmp_path / "root").build()
    patient = next((tmp_path / "root" / "files").rglob("p10000032"))
    shutil.rmtree(patient)
    with pytest.raises(ValueError, match=r"reports are not in files/ .*reports=FOLDER.*max_missing=") as caught:
        at("mimic_cxr", tmp_path / "root").screen()
    share = re.search(r"max_missing=([0-9.]+)", str(caught.value))
    assert share
    cohort, summary = at("mimic_cxr", tmp_path / "root", max_missing=float(share[1])).prepare()
    assert 0 < len(cohort) < len(whole)
    assert summary["skipped: report not under reports"] > 0


def test_a_film_with_several_questions_is_decoded_and_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three films in four questions: each question has its own row, and the first two one film."""
    decoded: list[Path] = []
    decode = images.decode_stored
    monkeypatch.setattr(images, "decode_stored", lambda file, *given: decoded.append(file) or decode(file, *given))
    cohort = at("ehrxqa", tmp_path / "root", cache=str(tmp_path / "cache")).build()
    shown = cohort.images(np.arange(4))
    assert len(decoded) == 3
    assert np.array_equal(shown[0], shown[1])
    kept = [np.load(file, mmap_mode="r").shape for file in (tmp_path / "cache").rglob("*.npy")]
    assert kept == [(3, 32, 32)]
    decoded[0].write_bytes(b"no image")
    left, summary = at("ehrxqa", tmp_path / "root").prepare()
    assert len(left) == 2
    assert summary["skipped: unsupported image format"] == 2


def test_a_brset_that_lacks_more_photographs_than_published_is_refused(tmp_path: Path) -> None:
    source = at("brset", tmp_path / "root")
    assert source.prepare()[1]["skipped: image not under root"] == 1
    for index in range(7):
        (tmp_path / "root" / "fundus_photos" / f"img{index:05d}.jpg").unlink()
    with pytest.raises(ValueError, match=r"8 of 13 images are not under root.* max_missing=0\.616 "):
        source.build()


def test_many_images_without_a_cache_are_worth_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten squares of 32 pixels are 10,240 bytes: one byte less than that is too many, and a cache is none at all."""
    monkeypatch.setattr("fedvlp.data.images.LARGE", 10_240)
    at("mbrset", tmp_path / "root").build()
    assert not caplog.records
    monkeypatch.setattr("fedvlp.data.images.LARGE", 10_239)
    at("mbrset", tmp_path / "root", cache=str(tmp_path / "cache")).build()
    assert not caplog.records
    at("mbrset", tmp_path / "root").build()
    assert "mbrset source: 10 images are decoded into 0.0 GB of memory" in caplog.text


# Splits


def test_a_patient_is_in_the_split_that_is_held_out_most() -> None:
    patients = ["a", "a", "b", "b", "c", "d", "d"]
    splits = ["train", "test", "val", "train", "", "", "val"]
    settled, moved = by_patient(patients, splits)
    assert settled == ["test", "test", "val", "val", "", "val", "val"]
    assert moved == 3


def test_covidx_has_the_published_test_split_and_no_patient_in_both(tmp_path: Path) -> None:
    """Patient 0 of the one source is tested on, so its training film moves; patient 0 of the other is another."""
    cohort, summary = at("covidx", tmp_path / "root").prepare()
    assert summary["moved to the split of their patient"] == 1
    assert cohort.splits.tolist().count("test") == 2
    assert cohort.splits[0] == cohort.splits[10] == "test"
    assert cohort.splits[9] != "test"
    np.testing.assert_array_equal(cohort.labels[[0, 1, 2, 10]], np.eye(3, dtype=np.float32)[[0, 1, 2, 2]])
    assert cohort.splits.tolist().count("val") == 2, "20 % of ten patients"


def test_chexpert_validates_on_its_valid_table(tmp_path: Path) -> None:
    """Both from the folder above and from the collection's own; a test split is drawn from the training table."""
    cohort = at("chexpert", tmp_path / "root").build()
    assert cohort.splits[6:].tolist() == ["val", "val"]
    assert set(cohort.splits[:6].tolist()) == {"train", "test"}
    inner = CheXpertSource.at(tmp_path / "root" / "CheXpert-v1.0-small", image_size=32)
    assert inner.build().fingerprint == cohort.fingerprint
    (tmp_path / "root" / "CheXpert-v1.0-small" / "valid.csv").unlink()
    assert at("chexpert", tmp_path / "root").valid is None


def test_nih_tests_on_the_published_list(tmp_path: Path) -> None:
    cohort = at("nih_cxr14", tmp_path / "root").build()
    assert [row for row, split in enumerate(cohort.splits) if split == "test"] == [6, 7]
    drawn = NIHSource.at(tmp_path / "root", test_list=None, image_size=32, test_fraction=0.5).build()
    assert drawn.splits.tolist().count("test") == 6, "settings outrank what is there"


def test_openi_alone_is_texts(tmp_path: Path) -> None:
    at("openi", tmp_path / "root")
    cohort = OpenISource(str(tmp_path / "root" / "NLMCXR_reports.tgz")).build()
    assert not cohort.has_image().any()
    assert cohort.has_report().all()


def test_openi_without_images_is_reports_with_findings_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = at("openi", tmp_path / "root", labels="Pneumonia,Edema").build()
    shutil.rmtree(tmp_path / "root" / "NLMCXR_png")
    cohort = at("openi", tmp_path / "root", labels="Pneumonia,Edema").build()
    assert "records are reports alone, with their findings" in caplog.text
    assert not cohort.has_image().any()
    assert set(whole.patients) <= set(cohort.patients)
    assert set(whole.reports) <= set(cohort.reports)


def test_reports_of_which_no_image_is_used_are_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    """And images whose report says nothing, of the collections that have images first."""
    bare, both = (at("openi", tmp_path / "root", alone=alone) for alone in (False, True))
    alone = set(OpenISource(str(tmp_path / "root" / "NLMCXR_reports.tgz")).build().patients) - set(
        bare.build().patients
    )
    cohort, summary = both.prepare()
    assert {p for p, there in zip(cohort.patients, cohort.has_image(), strict=True) if not there} == alone
    assert summary["used"] == bare.prepare()[1]["used"] + len(alone)
    assert summary.get("with a report alone", 0) == len(alone)
    for name in ("mimic_cxr", "padchest"):
        few, many = (at(name, tmp_path / name, min_report_words=99, alone=alone) for alone in (False, True))
        with pytest.raises(ValueError, match="no usable record"):
            few.build()
        assert len(many.build()) >= USED[name]
        assert not many.build().has_report().any()


# What lies beside the files of a collection
def clutter(root: Path) -> None:
    """What a Mac and a NAS lay beside every file, and in folders of their own."""
    for file in [path for path in root.rglob("*") if path.is_file()]:
        file.with_name(f"._{file.name}").write_bytes(b"\x00\x05\x16\x07")
        for folder in ("@eaDir", ".snapshot", "#recycle", "__MACOSX", ".Trashes", "$RECYCLE.BIN"):
            (file.parent / folder).mkdir(exist_ok=True)
            (file.parent / folder / file.name).write_bytes(b"canary")
        for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
            (file.parent / name).write_bytes(b"canary")


@pytest.mark.parametrize(
    "name", cases(("openi", "covid_radiography", "nih_cxr14", "siim", "chexpert", "padchest"), often=("openi", "siim"))
)
def test_what_a_mac_and_a_nas_lay_beside_is_no_part_of_a_collection(name: str, tmp_path: Path) -> None:
    plain = at(name, tmp_path / "root").build()
    if name == "openi":
        with tarfile.open(tmp_path / "root" / "NLMCXR_reports.tgz") as archive:
            archive.extractall(tmp_path / "root", filter="data")
        (tmp_path / "root" / "NLMCXR_reports.tgz").unlink()
    clutter(tmp_path / "root")
    cohort = at(name, tmp_path / "root").build()
    assert cohort.fingerprint == plain.fingerprint
    assert cohort.files == plain.files


@pytest.mark.parametrize("name", ["nih_cxr14", "siim"])
def test_images_that_are_there_twice_are_refused_with_their_number(name: str, tmp_path: Path) -> None:
    """Which of two files of one name the published one is, nobody knows; a thumbnail would do."""
    whole = at(name, tmp_path / "root").build()
    (image,) = (whole.files or ())[:1]
    assert image is not None
    copy = tmp_path / "root" / "zz thumbnails" / image.name
    copy.parent.mkdir()
    shutil.copy(image, copy)
    with pytest.raises(ValueError, match=r"1 of \d+ images are in several folders below root") as caught:
        at(name, tmp_path / "root").build()
    assert image.stem not in str(caught.value)


def test_the_four_archives_of_chexpert_are_the_collection(tmp_path: Path) -> None:
    """In a folder with the tables, in the first of them, and with train/ in them or not; one may stand for all."""
    whole = at("chexpert", tmp_path / "root").build()
    for number, (tables, within) in enumerate([("", ""), ("1", ""), ("1", "train"), ("", "train")]):
        root = tmp_path / str(number)
        batches = [root / f"CheXpert-v1.0 batch {index} ({name})" for index, name in
                   enumerate(("validate & csv", "train 1", "train 2", "train 3"), start=1)]  # fmt: skip
        for batch in batches:
            batch.mkdir(parents=True)
        source = tmp_path / "root" / "CheXpert-v1.0-small"
        for index, patient in enumerate(sorted((source / "train").iterdir())):
            shutil.copytree(patient, batches[1 + index % 3] / within / patient.name)
        shutil.copytree(source / "valid", batches[0] / "valid")
        for name in ("train.csv", "valid.csv"):
            shutil.copy(source / name, (batches[0] if tables else root) / name)
        for given in (root, batches[0] if tables else root):
            cohort = SOURCES["chexpert"].at(given, image_size=32).build()  # type: ignore[union-attr]
            assert cohort.fingerprint == whole.fingerprint
        shutil.rmtree(batches[2])
        with pytest.raises(ValueError, match=r"2 of 8 images are not under root.* max_missing=0\.25 "):
            SOURCES["chexpert"].at(root, image_size=32).build()  # type: ignore[union-attr]


def test_a_collection_of_which_no_image_is_there_is_not_offered_as_a_part(tmp_path: Path) -> None:
    at("nih_cxr14", tmp_path / "root")
    for file in (tmp_path / "root").rglob("*.png"):
        file.unlink()
    for most in (0.0, 1.0):
        with pytest.raises(ValueError, match="12 of 12 images are not under root: none is there") as caught:
            at("nih_cxr14", tmp_path / "root", max_missing=most).build()
        assert "max_missing" not in str(caught.value)


@pytest.mark.parametrize("release", ["COVIDx9A", "COVIDx_CXR-3A", "COVIDx8A"])
def test_every_release_of_covidx_with_three_classes_is_read(release: str, tmp_path: Path) -> None:
    whole = at("covidx", tmp_path / "root").build()
    for part in ("train", "test"):
        (tmp_path / "root" / f"{part}_COVIDx9A.txt").rename(tmp_path / "root" / f"{part}_{release}.txt")
    assert at("covidx", tmp_path / "root").build().fingerprint == whole.fingerprint


def test_lists_of_covidx_that_say_positive_or_negative_tell_covid_alone(tmp_path: Path) -> None:
    at("covidx", tmp_path / "root")
    for part, lines in (
        ("train", "0 t0.png positive cohen\n1 t1.png negative rsna\n"),
        ("test", "2 e0.png negative bimcv\n"),
    ):
        (tmp_path / "root" / f"{part}_COVIDx9A.txt").unlink()
        (tmp_path / "root" / f"{part}_COVIDx9B.txt").write_text(lines, encoding="utf-8")
    cohort = at("covidx", tmp_path / "root").build()
    assert cohort.label_names == ("No Finding", "Pneumonia", "COVID-19")
    assert cohort.labels[0].tolist() == [0, 0, 1]
    assert np.isnan(cohort.labels[1:, :2]).all()
    assert cohort.labels[1:, 2].tolist() == [0, 0]


# The readers of later collections


def test_covid_radiography_takes_the_films_and_no_masks(tmp_path: Path) -> None:
    cohort = at("covid_radiography", tmp_path / "root", labels=("COVID-19", "Edema", "Lung Opacity")).build()
    expected = np.array([[0, np.nan, 0]] * 4 + [[1, np.nan, 0]] * 2 + [[0, np.nan, 1]] * 2, dtype=np.float32)
    np.testing.assert_array_equal(cohort.labels, expected)
    assert cohort.images(np.arange(8))[:, 16, 16].tolist() == [10, 20, 50, 50, 10, 20, 10, 20]


def test_messidor_applies_the_errata(tmp_path: Path) -> None:
    """The grade of one photograph of Base11 is 0 as published and as corrected 0; of Base33 a repetition is left out.

    A photograph of Base11 whose table says 2 is corrected as well. Folder k has grades k mod 4 and k mod 3.
    """
    cohort, summary = at("messidor", tmp_path / "root").prepare()
    assert summary["skipped: repeated image (errata)"] == 1
    assert (
        cohort.reports[:4]
        == ("retinal image with no diabetic retinopathy and no risk of macular edema",) * 2
        + ("retinal image with mild diabetic retinopathy and low risk of macular edema",) * 2
    )
    columns = "Image name,Ophthalmologic department,Retinopathy grade,Risk of macular edema "
    rows = [("20051020_63045_0100_PP.tif", "LaTIM", 3, 0), ("20050101_01_0100_PP.tif", "LaTIM", 3, 0)]
    table(tmp_path / "root" / "Base11" / "Annotation_Base11.csv", columns, rows)
    corrected = at("messidor", tmp_path / "root").build()
    np.testing.assert_array_equal(corrected.labels[:2], np.array([[0, 0], [1, 0]], dtype=np.float32))
    table(tmp_path / "root" / "Base12" / "Annotation_Base12.csv", columns, [("x.tif", "LaTIM", 4, 0)])
    with pytest.raises(ValueError, match="1 of 1 values of Retinopathy grade are no grade of 0 to 3"):
        at("messidor", tmp_path / "root").build()


def test_brset_and_mbrset_caption_their_grades(tmp_path: Path) -> None:
    """ICDR of 1 or more is retinopathy; a photograph without a grade is left out; splits are by patient."""
    cohort = at("brset", tmp_path / "brset").build()
    np.testing.assert_array_equal(cohort.labels[:3], np.array([[0, 0], [1, 1], [1, 0]], dtype=np.float32))
    assert cohort.reports[4] == "retinal image with proliferative diabetic retinopathy and no macular edema"
    other, summary = at("mbrset", tmp_path / "mbrset").prepare()
    assert summary["skipped: not graded"] == 2
    np.testing.assert_array_equal(other.labels, cohort.labels[:10])
    assert other.reports == cohort.reports[:10]
    assert len(set(other.patients)) == 5
    columns = "patient,file,final_icdr,final_edema"
    path = table(tmp_path / "mbrset" / "labels_mbrset.csv", columns, [(1, "1.1.jpg", "7", "no")])
    with pytest.raises(ValueError, match="1 of 1 values of final_icdr are no grade"):
        MBRSETSource(str(path)).build()


def test_siim_joins_the_outlines_of_a_film_and_takes_spaced_columns(tmp_path: Path) -> None:
    cohort = at("siim", tmp_path / "root").build()
    assert cohort.labels[:, 0].tolist() == [0, 1] * 5
    table(tmp_path / "root" / "train-rle.csv", "ImageId, EncodedPixels", [("1.2.1", "x")])
    with pytest.raises(ValueError, match="siim source: EncodedPixels of 1 rows is neither run lengths nor -1"):
        at("siim", tmp_path / "root").build()


def test_ehrxqas_text_is_question_and_answer_and_its_patients_are_mimic_cxrs(tmp_path: Path) -> None:
    cohort, summary = at("ehrxqa", tmp_path / "root").prepare()
    assert [report.rstrip(".") for report in cohort.reports] == [
        "is there a pleural effusion yes", "list all findings of the left lung pleural effusion and edema",
        "is the heart enlarged no", "is this an ap view yes",
    ]  # fmt: skip
    assert summary["skipped: text empty or too short"] == 1
    assert [len(cohort.rows(split)) for split in ("train", "val", "test")] == [2, 1, 1]
    mimic_cxr, _ = at("mimic_cxr", tmp_path / "mimic").prepare()
    assert set(cohort.patients) > set(mimic_cxr.patients), "one person has one id in both"


def test_ehrxqas_questions_without_answers_are_refused(tmp_path: Path) -> None:
    at("ehrxqa", tmp_path / "root")
    file = tmp_path / "root" / "mimiccxrvqa" / "dataset" / "train.json"
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([{key: value for key, value in row.items() if key != "answer"} for row in rows]))
    with pytest.raises(ValueError, match=r"3 of 3 questions in train.json lack one of .* answer; the files named"):
        at("ehrxqa", tmp_path / "root").build()


def test_chest_imagenome_joins_the_regions_of_a_film(tmp_path: Path) -> None:
    """Effusion is in one region of two: 1. Pneumothorax is denied: 0. Nobody speaks of edema: nan."""
    source = at(
        "chest_imagenome", tmp_path / "root", labels=("Pleural Effusion", "Pneumothorax", "Edema", "Cardiomegaly")
    )
    cohort, summary = source.prepare()
    assert cohort.reports == (
        "left pleural effusion without pneumothorax the heart is enlarged", "the heart is enlarged",
    )  # fmt: skip
    expected = np.array([[1, 0, np.nan, 1], [np.nan, np.nan, np.nan, 1]], dtype=np.float32)
    np.testing.assert_array_equal(cohort.labels, expected)
    assert cohort.splits.tolist() == ["train", "val"]
    assert (summary["skipped: images to avoid"], summary["skipped: text empty or too short"]) == (1, 1)
    mimic = at("mimic_cxr", tmp_path / "mimic").build()
    assert cohort.patients[0] == mimic.patients[0], "the same person in both collections"
    assert cohort.ids[0] == mimic.ids[0]
    (tmp_path / "root" / "silver_dataset" / "scene_graph" / "b1_SceneGraph.json").write_text('{"canary": 1}')
    with pytest.raises(ValueError, match=r"is no scene graph \(KeyError\)") as caught:
        source.build()
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "file", "columns", "missing"),
    [
        ("brset", "labels_brset.csv", "image_id,patient_id,DR_SDRG", "2 of 4 columns: DR_ICDR, macular_edema"),
        ("mbrset", "labels_mbrset.csv", "patient,file,final_icdr", "1 of 4 columns: final_edema"),
        ("siim", "train-rle.csv", "ImageId,Mask", "1 of 2 columns: EncodedPixels"),
        ("messidor", "Base11/Annotation_Base11.csv", "Image name,Grade", "2 of 3 columns: Retinopathy grade, Risk"),
        ("nih_cxr14", "Data_Entry_2017_v2020.csv", "Image Index,Patient ID", "2 of 4 columns: Finding Labels, Follow"),
    ],
)
def test_missing_columns_are_named(name: str, file: str, columns: str, missing: str, tmp_path: Path) -> None:
    at(name, tmp_path / "root")
    table(tmp_path / "root" / file, columns, [("canary",) * len(columns.split(","))])
    with pytest.raises(ValueError, match=f"lacks {missing}") as caught:
        at(name, tmp_path / "root").build()
    assert "canary" not in str(caught.value)


def test_lines_of_another_form_are_counted(tmp_path: Path) -> None:
    at("covidx", tmp_path / "root")
    (tmp_path / "root" / "train_COVIDx9A.txt").write_text("1 a.png healthy cohen\n2 b.png\n3 c.png normal cohen\n")
    with pytest.raises(ValueError, match="2 of 3 lines are not patient, file, class") as caught:
        COVIDxSource.at(tmp_path / "root").build()
    assert "b.png" not in str(caught.value)


def test_a_table_that_ends_within_a_row_is_not_read_as_if_it_were_blank(tmp_path: Path) -> None:
    """The film of a line that was cut off would have labels that nobody gave it."""
    name = "CheXpert-v1.0/train/patient00001/study1/view1_frontal.jpg"
    film(tmp_path / name, 9)
    row = chexpert_row(name, **{"No Finding": "1.0"})
    path = tmp_path / "CheXpert-v1.0" / "train.csv"
    path.write_text(",".join(row) + "\n" + ",".join([*list(row.values())[:2], "1.0"]) + "\n")
    with pytest.raises(ValueError, match=r"train\.csv is damaged: its line 2 ends before its last column; download it"):
        CheXpertSource.at(tmp_path, image_size=32).build()
