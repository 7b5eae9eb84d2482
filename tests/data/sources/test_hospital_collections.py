"""MIMIC-CXR, RSNA and CANDID-PTX: small fixtures in the published layout, and the real table where it is."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.published import BOX, REPORT, candid, mimic, rsna, table

from fedvlp.data.deid import PHIError
from fedvlp.data.labels import CHEXPERT
from fedvlp.data.report_text import sections
from fedvlp.data.sources.mimic_cxr import MIMICSource, meaning
from fedvlp.data.sources.tabular import CandidPTXSource, RSNASource

TABLES = Path(__file__).parents[3].parent / "shared" / "data" / "real-tables"
nan = np.nan


def test_mimic_takes_frontal_films_with_text_and_labels_by_name(tmp_path: Path) -> None:
    """Of six films one is lateral and one has neither impression nor findings; text is impression, then findings."""
    source = mimic(tmp_path / "mimic")
    cohort, summary = source.prepare()
    assert summary == {
        "rows": 6, "used": 4, "patients": 2, "skipped: not frontal": 1, "skipped: report empty or too short": 1,
    }  # fmt: skip
    assert cohort.reports[0] == "left effusion see above small left pleural effusion heart mildly enlarged heart"
    assert len(set(cohort.reports)) == 1
    assert cohort.splits.tolist() == ["train", "train", "test", "test"]
    assert len(set(cohort.studies)) == 3
    columns = [CHEXPERT.index(name) for name in ("Edema", "Pleural Effusion", "No Finding", "Fracture", "Pneumonia")]
    blank = [nan] * 5
    expected = np.array([[-1, 1, nan, nan, nan], blank, *[[nan, nan, 1, 0, nan]] * 2], dtype=np.float32)
    np.testing.assert_array_equal(cohort.labels[:, columns], expected)
    assert cohort.images(np.array([3, 0]))[:, 16, 16].tolist() == pytest.approx([30, 10], abs=8)
    assert len(MIMICSource(source.path, reports=source.root, image_size=32).build()) == 4, "text alone"
    everything = (cohort.ids, cohort.patients, cohort.studies, repr(cohort))
    assert "10000032" not in str(everything)


def test_mimic_validation_stays_apart_from_its_test_split(tmp_path: Path) -> None:
    source = mimic(tmp_path / "mimic")
    (tmp_path / "mimic/files/p11/p11000041/s50000003.txt").write_text("IMPRESSION: no change since yesterday.")
    assert source.build().splits.tolist() == ["train", "train", "val", "test", "test"]


def test_mimic_names_what_is_missing(tmp_path: Path) -> None:
    source = mimic(tmp_path / "mimic")
    root = tmp_path / "mimic"
    (root / "files/p10/p10000032/s50000001/a1.jpg").unlink()
    with pytest.raises(ValueError, match="1 of 4 images are not under root") as caught:
        source.build()
    assert "p10" not in str(caught.value)
    (root / "files/p10/p10000032/s50000002.txt").unlink()
    with pytest.raises(ValueError, match="1 of 4 reports are not in files/ there"):
        source.build()
    table(root / "mimic-cxr-2.0.0-split.csv", "dicom_id,split", [("a1", "train")])
    with pytest.raises(ValueError, match="5 of 6 images are in no split of train, validate, test"):
        source.build()
    table(root / "mimic-cxr-2.0.0-split.csv", "dicom_id,study_id", [])
    with pytest.raises(ValueError, match="lacks 1 of 2 columns: split"):
        source.build()
    (root / "mimic-cxr-2.0.0-split.csv").unlink()
    (root / "mimic-cxr-2.0.0-chexpert.csv").unlink()
    said = r"path lacks mimic-cxr-2\.0\.0-split\.csv, mimic-cxr-2\.0\.0-chexpert\.csv \(or \.gz\)"
    with pytest.raises(ValueError, match=said):
        source.build()
    with pytest.raises(ValueError, match="it must be jpg or dcm"):
        MIMICSource(str(root), suffix="../x").build()


def test_sections_are_found_by_their_capitals() -> None:
    for report, expected in [
        (REPORT, {"EXAMINATION", "FINDINGS", "IMPRESSION"}),
        ("nothing: of the kind", set()),
        ("FINDINGS AND IMPRESSION: clear lungs", {"FINDINGS"}),
        ("FINDING: a\nFINAL IMPRESSION: b", {"FINDINGS", "IMPRESSION"}),
    ]:
        assert sections(report).keys() == expected


def test_a_section_ends_at_the_next_and_two_of_a_name_are_one() -> None:
    found = sections("IMPRESSION: one.\n PORTABLE CHEST (1 VIEW):\n two.\nIMPRESSION: three.")
    assert found == {"IMPRESSION": "one. three.", "PORTABLE CHEST (1 VIEW)": "two."}


HEADINGS = {
    "FINDINGS": "FINDINGS", "FINAL IMPRESSION": "IMPRESSION", "CONCLUSION": "IMPRESSION", "IMPRESSON": "IMPRESSION",
    "FINDNGS": "FINDINGS", "PA AND LATERAL VIEWS OF THE CHEST": "FINDINGS", "CHEST, TWO VIEWS": "FINDINGS",
    "PORTABLE AP CHEST RADIOGRAPH": "FINDINGS", "PORTABLE CHEST": "FINDINGS",
    "FRONTAL AND LATERAL VIEWS OF THE CHEST": "FINDINGS", "AP AND LATERAL CHEST RADIOGRAPHS": "FINDINGS",
    "UPRIGHT AP VIEW OF THE ABDOMEN": "FINDINGS", "HISTORY": "", "CLINICAL HISTORY, CHEST PAIN": "",
    "COMPARISON CHEST FILM": "", "REASON FOR EXAM": "", "ADDENDUM": "ADDENDUM", "WET READ": "",
}  # fmt: skip


def test_mimic_headings_mean_what_its_authors_say() -> None:
    assert {heading: meaning(heading) for heading in HEADINGS} == HEADINGS


BARE = {  # reports without the words impression and findings
    " FINAL REPORT\n INDICATION:  Cough.\n\n CONCLUSION:  Large left effusion.\n\n NOTIFICATION: Dr. A.\n":
        "large left effusion",
    " FINAL REPORT\n INDICATION:  Cough.\n\n PORTABLE CHEST (1 VIEW):  Large left effusion.\n": "large left effusion",
    " CHEST, TWO VIEWS: Clear lungs.\n\n FINDINGS:  Small heart.\n\n CONCLUSION:  No acute disease.\n":
        "no acute disease clear lungs small heart",
    **dict.fromkeys([  # nor any heading of a text: their last paragraphs
        " FINAL REPORT\n HISTORY:  Cough.\n \n COMPARISON:  None.\n \n PA and lateral views.  Small\n effusion.\n",
        " FINAL REPORT\n HISTORY:  Cough.\n\n COMPARISON:  ___.\n\n PA and lateral views.\n\n Small effusion.\n",
        " FINAL REPORT\n CHEST RADIOGRAPH\n \n PA and lateral views.  Small effusion.\n",
        " FINAL REPORT\n PA and lateral views.  Small effusion.\n",
        "PA and lateral views.\r\n\r\nSmall effusion.",
    ], "pa and lateral views small effusion"),
}  # fmt: skip
OPACITY = " FINAL REPORT\n COMPARISON: None.\n\n IMPRESSION: Opacity on the left.\n"


def test_what_is_read_of_a_report(tmp_path: Path) -> None:
    """An impression first, whatever headings are; an addendum, before or behind what it corrects, and no banner."""
    reports, rule = dict(BARE), f" {'_' * 78}\n"
    for first, banner in enumerate(("FINAL ADDENDUM\n ADDENDUM:", "FINAL ADDENDUM\n", "ADDENDUM\n", "Addendum:")):
        parts = [f"                 {banner} The opacity is on the RIGHT side.\n", OPACITY]
        reports[rule.join(parts[:: 1 if first % 2 else -1])] = "opacity on the left the opacity is on the right side"
    for number, (report, expected) in enumerate(reports.items()):
        assert set(mimic(tmp_path / str(number), report).build().reports) == {expected}
    for number, report in enumerate((" FINAL REPORT\n HISTORY: Cough.\n\n COMPARISON: None.\n", " FINAL REPORT\n")):
        with pytest.raises(ValueError, match="no usable record"):
            mimic(tmp_path / f"empty{number}", report).build()


def test_candid_joins_the_rows_of_a_film(tmp_path: Path) -> None:
    cohort, summary = candid(tmp_path / "c").prepare()
    np.testing.assert_array_equal(cohort.labels, np.array([[nan, 1], [nan, 0], [nan, 1]], dtype=np.float32))
    assert cohort.reports == (
        "there is a small left apical pneumothorax", "no pneumothorax is seen", "clear lungs and pleura",
    )  # fmt: skip
    assert cohort.images(np.arange(3))[:, 16, 16].tolist() == [30, 40, 60]
    assert summary["skipped: report empty or too short"] == 1


def test_candid_refuses_an_outline_that_is_none(tmp_path: Path) -> None:
    source = candid(tmp_path / "c")
    table(Path(source.path), "SOPInstanceUID,EncodedPixels,Report", [("1", "", "a b c"), ("2", "1 x", "a b c")])
    with pytest.raises(ValueError, match="EncodedPixels of 2 rows is neither run lengths nor -1"):
        source.build()
    table(Path(source.path), "SOPInstanceUID,EncodedPixels,Report", [("1.2.9", "-1", "some words here")])
    with pytest.raises(ValueError, match="1 of 1 images are not under root"):
        source.build()
    table(Path(source.path), "SOPInstanceUID,Report", [])
    with pytest.raises(ValueError, match="lacks 1 of 3 columns: EncodedPixels"):
        source.build()


def test_rsna_has_one_row_per_patient(tmp_path: Path) -> None:
    """Pneumonia is Target; the detailed class tells normal films from other findings; p4 has none."""
    cohort = rsna(tmp_path / "r").build()
    assert cohort.label_names == ("Pneumonia", "No Finding", "Lung Opacity")
    expected = np.array([[0, 1, 0], [1, 0, 1], [0, 0, 0], [1, nan, nan]], dtype=np.float32)
    np.testing.assert_array_equal(cohort.labels, expected)
    assert cohort.images(np.arange(4))[:, 16, 16].tolist() == [10, 20, 30, 40]
    assert not cohort.has_report().any()
    plain = RSNASource(str(tmp_path / "r" / "stage_2_train_labels.csv"), labels=("Edema", "Pneumonia")).build()
    np.testing.assert_array_equal(plain.labels[:, 1], [0, 1, 0, 1])
    assert np.isnan(plain.labels[:, 0]).all()


def test_a_patients_boxes_are_the_mask_of_pneumonia(tmp_path: Path) -> None:
    """Two boxes on 32 x 32 pixels of 1024: whole pixels, half of one (inside) and less than half (outside)."""
    source = rsna(tmp_path / "r")
    rows: list[tuple[object, ...]] = [
        ("p1", "", "", "", "", 0), ("p2", 320, 0, 64, 48, 1), ("p2", 0, 992, 15, 32, 1), ("p3", "", "", "", "", 0),
        ("p4", 0, 0, 1024, 1024, 1),
    ]  # fmt: skip
    table(tmp_path / "r" / "stage_2_train_labels.csv", BOX, rows)
    cohort = source.build()
    assert cohort.masks is not None
    masks = cohort.masks(np.arange(4))["Pneumonia"]
    assert masks.shape == (4, 32, 32)
    assert masks.dtype == bool
    expected = np.zeros((32, 32), dtype=bool)
    expected[:2, 10:12] = True  # 48 rows of 1024 are a pixel and a half; 15 columns less than half of one
    assert (masks[1] == expected).all()
    assert masks[3].all()
    assert not masks[[0, 2]].any()


def test_a_box_that_is_not_on_the_film_is_refused(tmp_path: Path) -> None:
    for box in [("", 1, 1, 1), (1000, 0, 25, 9), (-1, 0, 9, 9), (0, 0, 0, 9), ("a", 0, 9, 9)]:
        source = rsna(tmp_path / "r")
        table(tmp_path / "r" / "stage_2_train_labels.csv", BOX, [("p1", *box, 1)])
        with pytest.raises(ValueError, match="1 boxes are not x, y, width and height within 1024 pixels"):
            source.build()


def test_rsna_refuses_rows_that_disagree(tmp_path: Path) -> None:
    source = rsna(tmp_path / "r")
    table(Path(source.path), BOX, [("p1", "", "", "", "", 0), ("p1", 1, 2, 3, 4, 1), ("p2", "", "", "", "", 2)])
    with pytest.raises(ValueError, match="in 2 rows Target is unknown, or not that of the patient's others"):
        source.build()
    source = rsna(tmp_path / "r")
    (tmp_path / "r" / "stage_2_train_images" / "p3.dcm").unlink()
    with pytest.raises(ValueError, match="1 of 4 images are not under root"):
        source.build()
    table(Path(source.path), "patientId,x,y", [])
    with pytest.raises(ValueError, match="lacks 3 of 6 columns: width, height, Target"):
        source.build()


def test_the_real_rsna_table() -> None:
    """26,684 patients, 6,012 with pneumonia (spec 11), 70/15/15 of them to train, validate and test (spec 10.2)."""
    path = TABLES / "kaggle_stage_2_train_labels.csv.zip"
    if not path.exists():
        pytest.skip("the real table is not on this machine (../shared/data/real-tables)")
    cohort = RSNASource(str(path)).build()
    assert len(cohort) == len(set(cohort.patients)) == 26_684
    assert (cohort.labels[:, 0] == 1).sum() == 6_012
    assert [len(cohort.rows(split)) for split in ("train", "val", "test")] == [18_679, 4_002, 4_003]


def test_a_table_in_an_archive_is_the_same_table(tmp_path: Path) -> None:
    source = rsna(tmp_path / "r")
    with zipfile.ZipFile(tmp_path / "r" / "labels.csv.zip", "w") as archive:
        archive.write(source.path, "stage_2_train_labels.csv")
    zipped = RSNASource(str(tmp_path / "r" / "labels.csv.zip"), source.root, classes=source.classes, image_size=32)
    assert zipped.build().fingerprint == source.build().fingerprint


@pytest.mark.parametrize("kind", [mimic, candid])
def test_a_name_in_a_report_is_counted_before_the_text_is_cleaned(kind: Any, tmp_path: Path) -> None:
    """The gate refuses the cohort with counts alone; without the name it passes."""
    from fedvlp.data.deid import refuse_phi

    planted = "IMPRESSION: effusion, discussed with Dr. Canary by phone.\n"
    found = kind(tmp_path / "planted", report=planted).build()
    with pytest.raises(PHIError, match=r"name with title in [1-9]") as caught:
        refuse_phi(found.phi, len(found))
    assert "anary" not in str(caught.value)
    assert kind(tmp_path / "clean").build().phi == {}


def test_an_unreadable_image_is_left_out_and_the_cache_of_the_others_is_used(tmp_path: Path) -> None:
    source = candid(tmp_path / "c")
    (tmp_path / "c" / "1.2.4.png").write_bytes(b"canary")
    cached = CandidPTXSource(source.path, source.root, image_size=32, cache=str(tmp_path / "cache"))
    cohort, summary = cached.prepare()
    assert summary["skipped: unsupported image format"] == 1
    assert cohort.images(np.arange(2))[:, 16, 16].tolist() == [30, 60]
    assert len([folder for folder in (tmp_path / "cache").iterdir() if folder.is_dir()]) == 1, "and not built twice"
    assert cached.build().fingerprint == cohort.fingerprint
