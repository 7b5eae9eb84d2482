"""The built-in cohort: determinism, laziness, agreement of labels, words, pixels and masks, and the files it writes."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedvlp
from fedvlp.data.cohort import digest
from fedvlp.data.synthetic.cases import EFFUSION, FINDINGS, PACEMAKER, SIDES
from fedvlp.data.synthetic.drawn_cohort import COHORTS, SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.data.synthetic.latent import LatentCohort

SPEC = SyntheticCohort()
SMALL = SyntheticCohort(sites=2, size=60, image_size=48, seed=3)
MENTION = ("edema", "effusion", "consolidation", "pneumothorax", "pneumonia")  # by finding
CODE = """
import numpy as np
from fedvlp.data.cohort import digest
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
c = SyntheticCohort(sites=2, size=60, image_size=48, seed=3).build()
print(digest(c.images(np.array([41, 7])).tobytes(), *c.reports, c.labels.tobytes(), *c.sites, *c.splits, c.fingerprint))
from fedvlp.data.synthetic.latent import LatentCohort
print(LatentCohort(size=64, seed=3).build().fingerprint)
"""


@pytest.fixture(scope="module")
def cohort():
    return SPEC.build()


def test_same_bytes_in_another_process():
    c = SMALL.build()
    here = digest(
        c.images(np.array([41, 7])).tobytes(), *c.reports, c.labels.tobytes(), *c.sites, *c.splits, c.fingerprint
    )
    home = str(Path(fedvlp.__path__[0]).parent)
    there = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=home, env={"PYTHONHASHSEED": "9"}
    )
    assert there.stdout.splitlines() == [here, LatentCohort(size=64, seed=3).build().fingerprint]


@pytest.mark.parametrize("size", [48, 64, 224])
def test_a_row_is_the_same_whichever_rows_are_asked_for(size):
    images = SyntheticCohort(size=60, sites=2, image_size=size, seed=1).build().images
    rows = np.arange(20 if size > 100 else 60)
    full = images(rows)
    assert full.shape == (len(rows), size, size)
    assert full.dtype == np.uint8
    some = np.array([17, 3, 3, 11, 0])
    assert np.array_equal(images(some), full[some])
    assert np.array_equal(images(np.array([5])), full[5:6])
    assert images(np.array([], dtype=int)).shape == (0, size, size)


def test_seed_and_every_field_change_the_fingerprint():
    prints = {SMALL.build().fingerprint}
    changes = ({"seed": 4}, {"image_size": 64}, {"beta": 0.3}, {"hard_site": "site-2"}, {"label_code": "positive"})
    for change in (*changes, {"shared_habits": True}):
        fields = {"sites": 2, "size": 60, "image_size": 48, "seed": 3, **change}
        prints.add(SyntheticCohort(**fields).build().fingerprint)
    assert len(prints) == 7


def test_what_old_fingerprints_do_not_know_changes_them_only_where_it_is_used():
    """Runs of before these settings go on: the fingerprint of a cohort without them is the one that it had."""
    old = "43fba8e6a007d0939091eaf8b9009f90bd3b5461ce031072645dba3a45654c99"
    assert SPEC.build().fingerprint == old
    changes = ({"labels": "fourteen"}, {"omitted": 0.3}, {"test_rows": 100}, {"captions": ("Edema",)})
    prints = {dataclasses.replace(SPEC, **change).build().fingerprint for change in changes}
    assert len(prints | {old}) == 5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"labels": "six"}, "five, fourteen"), ({"omitted": 1.1}, "0 to 1"), ({"test_rows": 201}, "twice as many"),
     ({"test_rows": -1}, "0 or"), ({"captions": ("Edema", "Grade")}, "captions of Grade; expected some of Edema")],
)  # fmt: skip
def test_impossible_settings_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        SyntheticCohort(**wrong)


def test_captions_grade_what_the_film_shows_and_there_are_few():
    """As many as MESSIDOR's 12 for two findings, or fewer than 16: the same film gets the same caption."""
    spec = dataclasses.replace(SPEC, captions=("Edema", "Pleural Effusion"))
    cases, cohort = spec.cases(), spec.build()
    assert np.array_equal(cohort.images(np.arange(3)), SPEC.build().images(np.arange(3)))
    assert cohort.sentences is None
    assert dataclasses.replace(SPEC, captions=["Edema", "Pleural Effusion"]) == spec, "as a job's file has it"
    assert 9 <= len(set(cohort.reports)) <= 16
    sizes = (("mild", "moderate", "severe"), ("small", "moderate", "large"))
    for row, caption in enumerate(cohort.reports):
        edema, effusion = (
            sizes[kind][cases.severity[row, kind]] if cases.present[row, kind] else "no" for kind in (0, 1)
        )
        assert caption == f"chest film with {edema} pulmonary edema and {effusion} pleural effusion"


def test_fourteen_labels_are_what_the_film_shows_and_the_last_are_rare():
    spec = dataclasses.replace(SPEC, size=6000, labels="fourteen")
    cases, cohort = spec.cases(), spec.build()
    label = dict(zip(cohort.label_names, cohort.labels.T, strict=True))
    assert len(label) == 14
    assert np.array_equal(cohort.labels[:, :5], cases.labels, equal_nan=True)
    assert np.array_equal(label["Pacemaker"] == 1, cases.devices[:, PACEMAKER])
    assert np.array_equal(label["Cardiomegaly"] == 1, cases.heart > 0)
    rates = {name: (values == 1).mean() for name, values in label.items()}
    assert 0.01 < rates["Bilateral Pneumothorax"] < 0.02 < rates["Elevated Left Diaphragm"] < 0.04
    assert all(rate > 0.05 for name, rate in list(rates.items())[:12])
    one, both = label["Pneumothorax"], label["Bilateral Pneumothorax"]
    assert np.array_equal(np.isnan(both), np.isnan(one))
    assert np.array_equal(both == -1, one == -1)
    assert np.array_equal(both == 1, (one == 1) & (cases.side[:, 3] == 2))


def said_of(reports, labels, finding, value):
    """Share of the studies with this label whose report names the finding."""
    rows = np.flatnonzero(labels[:, finding] == value)
    return np.mean([MENTION[finding] in reports[row].lower() for row in rows])


def test_reports_leave_out_the_stated_share_and_contradict_nothing():
    whole, less = SPEC.build(), dataclasses.replace(SPEC, omitted=0.4).build()
    assert np.array_equal(whole.labels, less.labels, equal_nan=True)
    assert np.array_equal(whole.images(np.arange(8)), less.images(np.arange(8)))
    for finding in range(5):
        for value in (1, 0, -1):
            assert said_of(whole.reports, whole.labels, finding, value) == 1
            near = 0.15 if value < 0 else 0.06  # few are uncertain
            assert said_of(less.reports, less.labels, finding, value) == pytest.approx(0.6, abs=near)
    sick = np.isin(less.labels, (1, -1)).any(axis=1)
    assert not any("no acute" in less.reports[row].lower() and "bony" not in less.reports[row].lower()
                   for row in np.flatnonzero(sick))  # fmt: skip
    nothing = dataclasses.replace(SMALL, omitted=1.0).build()
    assert not any(word in report.lower() for word in (*MENTION, "pacemaker", "heart") for report in nothing.reports)


@pytest.mark.parametrize("name", sorted(COHORTS))
def test_named_cohorts_have_a_thousand_queries_a_site(name):
    cohort = COHORTS[name].build()
    names = sorted(set(cohort.sites))
    assert len(names) == 5
    for site in names:
        assert len(cohort.rows("test", site)) >= 1000
        assert len(cohort.rows("train", site)) >= 500
    rates = np.array([(cohort.labels[np.array(cohort.sites) == site] == 1).mean(axis=0) for site in names])
    skew = (rates.max(axis=0) / rates.min(axis=0)).max()
    assert skew > 5 if name == "label-skew" else skew < 4
    styles = COHORTS[name].cases().styles
    assert len({style.contrast for style in styles}) == (1 if name == "label-skew" else 5)


def test_splits_are_by_patient_and_every_site_has_enough_of_each(cohort):
    patients = len(set(cohort.patients))
    assert 1.2 < len(cohort) / patients < 1.4
    assert len(set(zip(cohort.patients, cohort.sites, strict=True))) == patients  # a patient is known to one site
    for site in (f"site-{k}" for k in range(1, 6)):
        sizes = [len(cohort.rows(split, site)) for split in ("train", "val", "test")]
        assert min(sizes) >= 32
        assert sizes[0] > 0.5 * sum(sizes)
    assert sum(len(cohort.rows(split)) for split in ("train", "val", "test")) == 2000


def test_all_combinations_occur_and_labels_are_skewed(cohort):
    present = SPEC.cases().present
    assert len(np.unique(present @ (1 << np.arange(5)))) == 32
    values, counts = np.unique(cohort.labels[~np.isnan(cohort.labels)], return_counts=True)
    assert values.tolist() == [-1, 0, 1]
    assert 0.01 < counts[0] / counts.sum() < 0.06

    def spread(beta: float) -> float:
        cases = SyntheticCohort(beta=beta, image_size=32).cases()
        mentioned = ~np.isnan(cases.labels)
        return float(np.std([mentioned[cases.site == k].mean(axis=0) for k in range(5)], axis=0).mean())

    assert spread(0.1) > 2 * spread(1e6)


def test_a_finding_is_named_exactly_where_its_label_is_not_blank(cohort):
    for finding, word in enumerate(MENTION):
        named = np.array([word in report.lower() for report in cohort.reports])
        assert np.array_equal(named, ~np.isnan(cohort.labels[:, finding])), word


def test_reports_state_side_zone_and_severity_and_mostly_differ(cohort):
    cases = SPEC.cases()
    only = np.flatnonzero((cases.present.sum(axis=1) == 1) & (cohort.labels[:, EFFUSION] == 1))
    for row in only[:50]:
        text = cohort.reports[row].lower()
        assert SIDES[cases.side[row, EFFUSION]] in text
        assert ("small", "moderate", "large")[cases.severity[row, EFFUSION]] in text
    assert len(set(cohort.reports)) > 0.97 * len(cohort)
    hedges = ("possible", "cannot be excluded", "questionable")
    hedged = np.array([any(h in report.lower() for h in hedges) for report in cohort.reports])
    assert np.array_equal(hedged, (cohort.labels == -1).any(axis=1))


def test_negated_and_unmentioned_findings_are_not_drawn(cohort):
    rows = np.flatnonzero(~SPEC.cases().present.any(axis=1))[:40]
    assert (cohort.labels[rows] == 0).any()
    renderer = SPEC.renderer()
    assert np.array_equal(renderer(rows), renderer.render(rows, without=FINDINGS))
    masks = SPEC.masks(rows)
    assert not any(masks[name].any() for name in FINDINGS)
    assert 0.10 < masks["lungs"].mean() < 0.45


@pytest.mark.parametrize("finding", range(5))
def test_mask_covers_the_pixels_that_removing_the_finding_changes(finding):
    name, cases, renderer = FINDINGS[finding], SPEC.cases(), SPEC.renderer()
    rows = np.flatnonzero((cases.present.sum(axis=1) == 1) & (cases.labels[:, finding] == 1))[:40]
    change = np.abs(renderer(rows).astype(int) - renderer.render(rows, without=[name]))
    mask = SPEC.masks(rows)[name]
    assert (mask.sum(axis=(1, 2)) >= 10).all()
    inside, outside = change[mask].mean(), change[~mask].mean()
    assert inside > 6
    assert inside > 8 * outside
    strong = change > 12
    assert (strong & mask).sum() / strong.sum() > 0.8


@pytest.mark.parametrize("finding", range(5))
def test_the_patients_right_is_on_the_left_of_the_image(finding):
    cases = SPEC.cases()
    half = SPEC.image_size // 2
    for side, (near, far) in {0: (slice(0, half), slice(half, None)), 1: (slice(half, None), slice(0, half))}.items():
        rows = np.flatnonzero(cases.present[:, finding] & (cases.side[:, finding] == side))[:30]
        mask = SPEC.masks(rows)[FINDINGS[finding]]
        assert (mask[:, :, near].sum(axis=(1, 2)) > 0).all()
        assert mask[:, :, far].sum() < 0.02 * mask.sum()
    rows = np.flatnonzero(cases.present[:, finding] & (cases.side[:, finding] == 2))[:10]
    mask = SPEC.masks(rows)[FINDINGS[finding]]
    assert (mask[:, :, :half].any(axis=(1, 2)) & mask[:, :, half:].any(axis=(1, 2))).all()


@pytest.mark.parametrize("finding", [2, 4])
def test_upper_lies_above_mid_above_lower_and_severe_is_larger(finding):
    cases = SPEC.cases()

    def masks(select: np.ndarray) -> np.ndarray:
        rows = np.flatnonzero(cases.present[:, finding] & (cases.side[:, finding] < 2) & select)[:60]
        return SPEC.masks(rows)[FINDINGS[finding]]

    heights = [np.nonzero(masks(cases.zone[:, finding] == zone))[1].mean() for zone in range(3)]
    assert heights[0] + 4 < heights[1] < heights[2] - 4
    areas = [masks(cases.severity[:, finding] == severity).mean() for severity in range(3)]
    assert areas[0] < areas[1] < areas[2]


def test_devices_can_be_seen():
    rows = np.flatnonzero(SPEC.cases().devices[:, PACEMAKER])[:20]
    renderer = SPEC.renderer()
    change = renderer(rows).astype(int) - renderer.render(rows, without=["pacemaker"])
    assert (change.max(axis=(1, 2)) > 30).all()


def test_sites_differ_in_acquisition_and_the_hard_site_is_harder():
    easy, hard = SyntheticCohort(seed=2), SyntheticCohort(seed=2, hard_site="site-3")
    rows = np.flatnonzero(easy.cases().site == 2)[:64]
    assert np.array_equal(hard.cases().site, easy.cases().site)
    others = np.flatnonzero(easy.cases().site == 0)[:16]
    np.testing.assert_array_equal(easy.build().labels, hard.build().labels)

    def noise(spec: SyntheticCohort) -> float:
        films = spec.renderer()(rows).astype(float)
        return float(np.abs(np.diff(films, axis=2)).mean())

    assert noise(hard) > 1.3 * noise(easy)
    reports = hard.build().reports
    assert all(reports[row].startswith("cxr") for row in rows)
    assert not any(reports[row].startswith("cxr") for row in others)
    means = [easy.renderer()(np.flatnonzero(easy.cases().site == k)[:64]).mean() for k in range(5)]
    assert max(means) - min(means) > 5


def test_shared_habits_are_those_of_the_first_site_and_leave_the_findings_as_they_are():
    own, shared = SyntheticCohort(seed=2), SyntheticCohort(seed=2, shared_habits=True)
    np.testing.assert_array_equal(own.build().labels, shared.build().labels)
    styles = shared.cases().styles
    assert [style.name for style in styles] == [style.name for style in own.cases().styles]
    assert {dataclasses.replace(style, name="") for style in styles} == {
        dataclasses.replace(own.cases().styles[0], name="")
    }
    first, third = (np.flatnonzero(own.cases().site == site)[:16] for site in (0, 2))
    np.testing.assert_array_equal(own.renderer()(first), shared.renderer()(first))
    assert not np.array_equal(own.renderer()(third), shared.renderer()(third))
    hard = SyntheticCohort(seed=2, shared_habits=True, hard_site="site-3").cases().styles
    assert hard[2].noise > styles[2].noise
    assert hard[3] == styles[3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sites": 0}, "for 0 sites"),
        ({"sites": 5, "size": 10}, "10 studies for 5 sites"),
        ({"image_size": 8}, "expected 32..2048"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_nonsense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SyntheticCohort(**fields)


def test_unknown_hard_site_and_rows_out_of_range_are_refused():
    with pytest.raises(ValueError, match="hard_site is 'site-9'"):
        SyntheticCohort(hard_site="site-9").build()
    with pytest.raises(IndexError, match=r"0\.\.59"):
        SMALL.renderer()(np.array([60]))


def check_pairs(path: Path, cohort) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    assert list(lines[0]) == ["image", "report", "site", "patient_id", "study_id", "split", *FINDINGS]
    assert tuple(line["report"] for line in lines) == cohort.reports
    assert tuple(line["site"] for line in lines) == cohort.sites
    assert tuple(line["patient_id"] for line in lines) == cohort.patients
    read = np.array([[float(line[name] or "nan") for name in FINDINGS] for line in lines], dtype=np.float32)
    np.testing.assert_array_equal(read, cohort.labels)
    return lines


def test_png_round_trip(tmp_path):
    from PIL import Image

    cohort = SMALL.build()
    lines = check_pairs(write(SMALL, tmp_path), cohort)
    films = np.stack([np.asarray(Image.open(tmp_path / line["image"])) for line in lines])
    assert np.array_equal(films, cohort.images(np.arange(60)))


def test_dicom_round_trip_through_window_and_inversion(tmp_path):
    pydicom = pytest.importorskip("pydicom")
    from pydicom.pixels import apply_voi_lut

    cohort = SMALL.build().take(np.arange(24))
    lines = check_pairs(write(cohort, tmp_path, format="dicom"), cohort)
    films, kinds = cohort.images(np.arange(24)), set()
    for line, film in zip(lines, films, strict=True):
        data = pydicom.dcmread(tmp_path / line["image"])
        kinds.add(data.PhotometricInterpretation)
        assert (data.BitsAllocated, data.BitsStored) == (16, 12)
        assert data.pixel_array.max() < 4096
        shown = apply_voi_lut(data.pixel_array, data) / 4095 * 255
        if data.PhotometricInterpretation == "MONOCHROME1":
            shown = 255 - shown
        assert np.abs(shown - film).max() < 0.51
        assert "SYNTHETIC" in str(data.PatientName)
        assert "SYNTHETIC" in data.InstitutionName
    assert kinds == {"MONOCHROME1", "MONOCHROME2"}


def test_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected 'png' or 'dicom'"):
        write(SMALL, tmp_path, format="jpeg")
