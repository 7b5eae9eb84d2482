"""A data set whose every text names somebody, and the search for those texts in whatever a run leaves or sends."""

from __future__ import annotations

import csv
from pathlib import Path

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write

CANARIES = ("zyxferreira", "qq0048392175", "zanzibar quagmire", "19470231", "kumquatweg", "acqx20481733")
"""A name, a record number, words of a report, a date of birth, an address, an accession number."""

SENTENCE = "Dr. Zyxferreira notes a Zanzibar Quagmire, MRN QQ0048392175."

RECORDER = """
import os, socket

def recorded(name):
    original = getattr(socket.socket, name)
    def send(self, data, *rest):
        with open(os.path.join(os.environ["RECORD"], str(os.getpid())), "ab") as file:
            for part in data if name == "sendmsg" else [data]:
                file.write(part)
        return original(self, data, *rest)
    setattr(socket.socket, name, send)

for name in ("send", "sendall", "sendmsg"):
    recorded(name)
"""
"""As sitecustomize.py on PYTHONPATH: every process appends what it sends through any socket to a file in $RECORD."""


def planted(folder: Path) -> Path:
    """Writes the table of two sites with 80 DICOM films: reports, ids, file names and tags name somebody."""
    import pydicom

    table = write(SyntheticCohort(sites=2, size=80, image_size=72), folder, format="dicom")
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        old = folder / row["image"]
        data = pydicom.dcmread(old)
        data.PatientName, data.PatientID, data.AccessionNumber = "ZYXFERREIRA^ANNA", "QQ0048392175", "ACQX20481733"
        data.PatientBirthDate, data.PatientAddress, data.BurnedInAnnotation = "19470231", "Kumquatweg 5", "NO"
        data.ImageComments = SENTENCE
        new = old.with_name(f"ZYXFERREIRA_{number}.dcm")
        data.save_as(new)
        old.unlink()
        row["image"] = str(new.relative_to(folder))
        row["patient_id"] = f"QQ0048392175-{row['patient_id']}"
        if "study_id" in row:
            row["study_id"] = f"ACQX20481733-{number}"
        row["report"] += f" {SENTENCE}"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return table


def found(folder: Path) -> list[str]:
    """Where a planted text is, in the content or the name of a file below ``folder``."""
    hits = []
    for path in sorted(folder.rglob("*")):
        content = path.name.encode() + (path.read_bytes() if path.is_file() else b"")
        hits += [f"{canary} in {path}" for canary in CANARIES if canary.encode() in content.lower()]
    return hits
