"""Writes a cohort to disk as PNG or DICOM files with a ``pairs.csv``, so that file readers can be tried anywhere.

The DICOM files differ on purpose: MONOCHROME1 and MONOCHROME2, several gains and offsets within 12 of 16 bits, the
window in the header. They have identifying attributes wherever a hospital's files do, all marked SYNTHETIC.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedvlp.data.cohort import Cohort, digest

if TYPE_CHECKING:
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort

STEP = 256  # images held in memory at once


def write(cohort: SyntheticCohort | Cohort, folder: str | Path, format: str = "png") -> Path:
    """Writes ``pairs.csv`` and ``images/<row>.png|dcm`` under ``folder``; returns the path of ``pairs.csv``.

    Columns: image (relative to ``folder``), report, site, patient_id, study_id, split, then one per label: 1, 0, -1
    uncertain, empty not mentioned. The pixels of a PNG are the cohort's; those of a DICOM are so after the header's
    window. Raises ValueError for a ``format`` other than "png" and "dicom".
    """
    if format not in ("png", "dicom"):
        raise ValueError(f"synthetic: format is {format!r}; expected 'png' or 'dicom'")
    table = cohort if isinstance(cohort, Cohort) else cohort.build()
    root = Path(folder)
    (root / "images").mkdir(parents=True, exist_ok=True)
    suffix = "png" if format == "png" else "dcm"
    names = [f"images/{row:06d}.{suffix}" for row in range(len(table))]
    for start in range(0, len(table), STEP):
        rows = np.arange(start, min(start + STEP, len(table)))
        for row, film in zip(rows.tolist(), table.images(rows), strict=True):
            if format == "png":
                _write_png(root / names[row], film)
            else:
                _write_dicom(root / names[row], film, table, row)
    pairs = root / "pairs.csv"
    with pairs.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "report", "site", "patient_id", "study_id", "split", *table.label_names])
        for row, name in enumerate(names):
            site = "" if table.sites is None else table.sites[row]
            labels = ["" if np.isnan(value) else int(value) for value in table.labels[row]]
            identity = (site, table.patients[row], table.studies[row], str(table.splits[row]))
            writer.writerow([name, table.reports[row], *identity, *labels])
    return pairs


def _write_png(path: Path, film: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(film).save(path)


def _write_dicom(path: Path, film: np.ndarray, table: Cohort, row: int) -> None:
    """One image [S, S] uint8 as a 12-bit DICOM, whose window maps back to the image's 256 grey levels exactly."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    gain, offset = (16, 14, 12, 10)[row % 4], (0, 100, 200, 300)[row % 4]
    stored = film.astype(np.uint16) * gain + offset  # at most 4080 < 2^12
    inverted = row % 3 == 2
    center, width = offset + 255 * gain / 2 + 0.5, 255 * gain + 1
    if inverted:
        stored, center = (4095 - stored).astype(np.uint16), 4096 - center
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.1.1"  # digital X-ray, for presentation
    meta.MediaStorageSOPInstanceUID = _uid("image", table.ids[row])
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    _identify(data, table, row)
    data.Rows, data.Columns = film.shape
    data.SamplesPerPixel = 1
    data.PhotometricInterpretation = "MONOCHROME1" if inverted else "MONOCHROME2"
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 12, 11, 0
    data.RescaleIntercept, data.RescaleSlope, data.RescaleType = 0, 1, "US"
    data.PresentationLUTShape = "INVERSE" if inverted else "IDENTITY"
    data.WindowCenter, data.WindowWidth = center, width
    data.PixelData = stored.astype("<u2").tobytes()
    data.save_as(path, enforce_file_format=True)


def _identify(data, table: Cohort, row: int) -> None:
    """Sets identifying attributes as a hospital's file has them, each of them evidently made up."""
    site = "" if table.sites is None else table.sites[row]
    number = int(digest(table.patients[row])[:6], 16)
    data.PatientName = f"SYNTHETIC^Patient^{number}"
    data.PatientID = table.patients[row]
    data.PatientBirthDate = f"19{number % 90:02d}0101"
    data.PatientSex = "MF"[number % 2]
    data.PatientAddress = f"{number % 1000} SYNTHETIC Street"
    data.OtherPatientIDs = f"SYN{number}"
    data.InstitutionName = f"SYNTHETIC HOSPITAL {site}".strip()
    data.InstitutionAddress = "SYNTHETIC Avenue 1"
    data.ReferringPhysicianName = "SYNTHETIC^Referrer"
    data.OperatorsName = "SYNTHETIC^Operator"
    data.StationName = "SYNTHETIC-DX"
    data.AccessionNumber = f"SYN{row:09d}"
    data.StudyDate = data.ContentDate = "20000101"
    data.StudyTime = data.ContentTime = "120000"
    data.StudyID = str(row)
    data.StudyInstanceUID = _uid("study", table.studies[row])
    data.SeriesInstanceUID = _uid("series", table.studies[row])
    data.SeriesNumber = data.InstanceNumber = 1
    data.Modality, data.BodyPartExamined = "DX", "CHEST"
    data.BurnedInAnnotation = "YES"
    data.ImageComments = f"SYNTHETIC comment naming SYNTHETIC^Patient^{number}"
    block = data.private_block(0x0099, "SYNTHETIC", create=True)
    block.add_new(0x01, "LO", f"SYNTHETIC private {table.patients[row]}")


def _uid(kind: str, name: str) -> str:
    """A UID under 2.25 (derived from a UUID-sized number) that is the same at every run."""
    return f"2.25.{int(digest(kind, name)[:32], 16)}"
