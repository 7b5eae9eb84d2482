"""The gate for report texts: what it counts, what passes, and that it repeats nothing. DICOM tags do not enter."""

from __future__ import annotations

import csv
import pickle
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedvlp.cli.tables import finding_lines
from fedvlp.data import deid
from fedvlp.data.deid import KINDS, PHIError, refuse_phi, scan, spans
from fedvlp.data.images import decode
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate

SHARED = Path(__file__).parents[2].parent / "shared" / "data"

IDENTIFYING = {
    "name with title": [
        "Discussed with Dr. Ferreira.",
        "seen by dr ferreira at noon",
        "MR SMITH",
        "MR. Head",
        "Prof O'Neill",
        "Dr. A. Ferreira",
        "Mrs. o'neill",
        "DR. VAN DER BERG",
        "Doctor \u00c9lise \u00d8ster",
        "Dr nowak",
    ],
    "labelled name": [
        "Patient name: Ferreira",
        "Dictated by: Anna Ferreira",
        "referring physician: Ferreira",
        "Signed by: \u00d8STER, ANNA",
        "Pt: van der Berg",
    ],
    "record number": ["MRN 00483921", "medical record number: AB-483921", "NHS no. 943 476 5919", "hospital id 48392"],
    "accession-like id": [
        "Accession #: CR20481",
        "see AX1048213",
        "compared with 20481733",
        "exam no: 48213",
        "compared with 20481733.",
        "ref 446720",
    ],
    "date": [
        "on 03/11/2019",
        "2019-11-03",
        "3.11.19",
        "3rd November 2019",
        "Nov. 3, 2019",
        "compared to 11-3-19",
        "compared to 8-9-10",
        "Ribs intact, film of 9/10/11",
        "13-Apr-2018",
        "since August 2009",
        "of February 25",
        "on 5 May",
        "2031-03-14T10:22:33+01:00",
        "14-MAR-31",
        "14MAR2031",
        "14/Mar/31",
        "3/2031",
        "2031-03",
        "14. März 2031",
        "14. Mär. 2031",
        "vom 14.03.",
        "14 mars 2031",
        "le 1er mars",
        "14 de marzo de 2031",
        "14 de março de 2031",
        "14 marzo",
        "enero de 2031",
        "14 maart 2031",
    ],
    "phone": [
        "called (617) 555-0134",
        "+1 617 555 0134",
        "pager 55521",
        "Tel: 030 / 12345",
        "+44 20 7946 0018",
        "+49 30 5518401",
        "called at 555-1772",
    ],
    "address": [
        "lives at 12 Elm Street",
        "221 Baker St.",
        "Lindenstraße 5",
        "360 W. Main St",
        "P.O. Box 1147",
        "3918 St. Mary's Road",
        "15 rue Victor Hugo",
    ],
    "email or link": ["mail a.ferreira@clinic.example", "https://pacs.example/x", "www.clinic.example"],
    "age above 89": ["a 94-year-old woman", "94 yo", "103 years old", "91M", "aged 90"],
}
HARMLESS = [
    "Heart size is normal. No pleural effusion, lungs are clear.",
    "Nodule of 1.2 x 3.4 cm in the right upper lobe, unchanged; T12 compression.",
    "2/3 of the left hemithorax; ratio 0.55; 5-10 mm; grade 3/6; SpO2 93-95%.",
    "Discussed with Dr. XXXX on XXXX at XXXX.",
    "MR imaging of the chest is advised. MS changes. Mild DR artefact. St. post sternotomy.",
    "ET tube 4.5 cm above the carina. 24-28 Fr chest tube. COVID-19 pneumonia at 37 weeks.",
    "March fracture. May 2 mm be normal? A 2 mm nodule may 3 years later be gone; decreased 5 mm.",
    "An 89-year-old woman, 45 yo, aged 90 days; T9 to T12, 95% saturation, 110 kV, 99 mm, born at 34 weeks.",
    "Dr. xxxx was informed. Compared with XXXX. Range 120-1500, ratio 1.2345678, +2 and +3.",
    "Fractures of ribs 8-9-10. Left rib fractures 9-10-11, T10-11-12; the 8-9-10 ribs, vertebrae 10/11/12.",
    "MR Chest, MR ABDOMEN, MR Lumbar Spine, MR C-Spine and DR Chest were advised.",
    "Serial 1 of 2 views, 120 kVp. 1. Edema. 2. Effusion.",
    "3/4 of the lung, ribs 10/11, L4/5, 1.2012 cm, 10.2011 mm, 5 mar 12 mm, 3 set 20. 1. Mar 2. Dec",
]


def test_an_identifier_is_counted_under_its_kind() -> None:
    assert IDENTIFYING.keys() == KINDS.keys()
    for kind, report in [(kind, text) for kind, texts in IDENTIFYING.items() for text in texts]:
        assert scan([report, "Lungs are clear."])[kind] == 1


def test_plain_findings_pass() -> None:
    for report in HARMLESS:
        assert scan([report]) == {}


def test_the_built_in_cohort_is_clean() -> None:
    assert scan(SyntheticCohort(size=2000).build().reports) == {}


def test_the_refusal_holds_counts_alone() -> None:
    refuse_phi({}, 5)
    with pytest.raises(PHIError, match=r"2 records: date in 1, name with title in 2\).*accept_phi_risk") as caught:
        refuse_phi(scan(["Dr. Ferreira 03/11/2019", "Dr. Ferreira again"]), 2)
    assert "Ferreira" not in str(caught.value)
    assert "2019" not in str(caught.value)


def planted(folder: Path) -> TableSource:
    """A table of which one report names a doctor."""
    table = write(SyntheticCohort(sites=2, size=60, image_size=72), folder)
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rows[0]["report"] += " Discussed with Dr. Ferreira."
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return TableSource(str(table), image_size=72)


def test_training_is_blocked_until_the_risk_is_accepted(tmp_path: Path) -> None:
    experiment = override(presets.get("fedavg"), "rounds.rounds", "1")
    for key, value in {"method.local_steps": "1", "training.batch_size": "4", "rounds.evaluate_every": "0"}.items():
        experiment = override(experiment, key, value)
    experiment = replace(experiment, data=planted(tmp_path / "table"))
    assembly = Assembly(experiment)
    assert assembly.cohort.phi == {"name with title": 1}
    assert assembly.cohort.take(assembly.cohort.rows("train")).phi == {"name with title": 1}
    with pytest.raises(PHIError, match="name with title in 1"):
        assembly.site(assembly.sites()[0])
    with pytest.raises(PHIError, match="name with title in 1"):
        simulate(experiment, RunFolder.create(tmp_path / "runs", experiment))
    assert not list((tmp_path / "runs").rglob("*.safetensors"))
    folder = RunFolder.create(tmp_path / "runs", experiment)
    simulate(experiment, folder, accept_phi_risk=True)
    assert folder.model.exists()


def test_no_tag_of_a_dicom_file_is_kept(tmp_path: Path) -> None:
    """Every text of a planted file is searched for in what loading gives, pickled whole, and in the cache."""
    pydicom = pytest.importorskip("pydicom", reason="pip install 'fedvlp[dicom]'")
    table = write(SyntheticCohort(sites=2, size=10, image_size=64), tmp_path / "table", format="dicom")
    words: set[bytes] = set()
    for path in sorted((tmp_path / "table").rglob("*.dcm")):
        data = pydicom.dcmread(path)
        data.PatientName, data.BurnedInAnnotation = "FERREIRA^ANNA", "NO"
        data.save_as(path)
        words |= {str(e.value).encode() for e in data.iterall() if e.VR in ("PN", "LO", "SH", "LT", "UI", "DA", "AS")}
    words = {word for word in words if len(word) > 5}
    assert b"FERREIRA^ANNA" in words
    loaded = decode(path, 64)
    source = TableSource(str(table), image_size=64, cache=str(tmp_path / "cache"), max_skipped=0.0)
    cohort = source.build()
    kept = pickle.dumps(loaded) + b"".join(f.read_bytes() for f in (tmp_path / "cache").rglob("*") if f.is_file())
    kept += repr((cohort.ids, cohort.patients, cohort.studies, cohort.fingerprint)).encode()
    assert len(cohort) == 10
    assert not [word for word in words if word in kept]


PUMPED = [
    *(
        "a.a.a.",
        "12-",
        "1.1.",
        "effusion ",
        "A. ",
        "1 ",
        "A-",
        "X-",
        "/1",
        "1,",
        "+1 ",
        "a@",
        "MR\t",
        "ref ",
        "Dr. ",
        "van ",
    ),
    *(
        " ",
        "\n",
        "\t",
        "\u00a0",
        " \n",
        "-",
        ".",
        "(",
        "9",
        "A",
        "X",
        "z",
        "\u00e9",
        "No. ",
        "- ",
        "94 ",
        "May ",
        "St. ",
    ),
]
BEFORE = {"name with title": "Dr.", "labelled name": "Patient:", "record number": "record", "accession-like id": "ref"}
BEFORE |= {"date": "May", "phone": "Tel", "address": "12 Elm", "email or link": "a@", "age above 89": "94"}


@pytest.mark.parametrize("size", [6_000, pytest.param(50_000, marks=pytest.mark.slow(seconds=5))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_search_takes_time_in_proportion_to_the_text(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 0.5 s of processor for 50,000 characters; "Tel" and 1,000 blanks took 37 s."""
    monkeypatch.setattr(deid, "KINDS", {kind: KINDS[kind]})
    for text in [before + piece * (size // len(piece)) + "!" for piece in PUMPED for before in ("", BEFORE[kind])]:
        start = time.process_time()
        spans(text)
        assert time.process_time() - start < 0.5


def test_padded_words_are_found_where_they_stand() -> None:
    report = "Seen by  Dr.\t \n  Ferreira  on the ward.   Tel" + " " * 40 + "030 12345"
    assert [(kind, report[start:end].split()) for kind, start, end in spans(report)] == [
        ("name with title", ["Dr.", "Ferreira"]),
        ("phone", ["Tel", "030", "12345"]),
    ]
    assert [one.words for one in scan([report]).shown] == [report[start:end] for _, start, end in spans(report)]


def test_equal_words_are_one_finding_with_its_count_and_some_of_its_rows() -> None:
    """A name in 88 reports is a line; words that differ in blanks and capitals alone are equal."""
    reports = [f"Seen by Dr.{' ' * (1 + row % 2)}Ferreira." for row in range(88)] + [
        "Seen by Dr. Ito. Seen by Dr. Ito."
    ]
    found = scan(reports)
    assert found == {"name with title": 89}
    assert [one.where for one in found.shown] == ["1", "2", "3", "4", "5", "89", "89"]
    _, *lines = [line.plain for line in finding_lines(found)]
    assert lines == [
        "1, 2, 3, 4, 5, ...: 88 reports  name with title  ...Seen by Dr. Ferreira....",
        "89  name with title  ...Seen by Dr. Ito. Seen by Dr. Ito....",
    ]


def test_who_is_credited_with_a_published_case_is_no_patient() -> None:
    for credit in ["Case courtesy of", "case Courtesy  of", "Contributed by"]:
        assert scan([f"{credit} Dr. Ferreira, effusion."]) == {}
        assert scan([f"{credit} Dr. Ferreira, seen with Dr. Ito."]) == {"name with title": 1}


@pytest.mark.slow(seconds=10)
def test_real_texts_are_counted() -> None:
    """The 361 clinical notes of pairs.csv credit authors and give dates; Open-I's reports are de-identified."""
    if not SHARED.exists():
        pytest.skip("needs ../shared/data")
    with (SHARED / "real-cxr" / "pairs.csv").open(encoding="utf-8") as file:
        notes = scan(row["report"] for row in csv.DictReader(file))
    assert notes.keys() == {"name with title", "date"}
    with tarfile.open(SHARED / "real-tables" / "NLMCXR_reports.tgz") as archive:
        members = [member for member in archive if member.name.endswith(".xml")]
        trees = (ElementTree.parse(archive.extractfile(member)) for member in members)  # type: ignore[arg-type]
        texts = [" ".join(part.text or "" for part in tree.iter("AbstractText")) for tree in trees]
    assert len(texts) == 3955
    assert scan(texts) == {}
