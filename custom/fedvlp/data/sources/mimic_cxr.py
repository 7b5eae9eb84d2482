"""MIMIC-CXR and MIMIC-CXR-JPG 2.0.0 (Johnson et al., 2019, https://arxiv.org/abs/1901.07042): images with reports."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedvlp.data.labels import CHEXPERT, by_name, names_of
from fedvlp.data.report_text import clean_report, sections
from fedvlp.data.screening import searched
from fedvlp.data.sources.published import Listing, Published, first_of, numbers, read_rows, refuse_absent, require_items
from fedvlp.data.sources.table import BELOW_ROOT

TABLES = {  # name after "mimic-cxr-2.0.0-" -> columns that are read
    "metadata": ("dicom_id", "subject_id", "study_id", "ViewPosition"),
    "split": ("dicom_id", "split"),
    "chexpert": ("study_id", *CHEXPERT),
}
SPLITS = {"train": "train", "validate": "val", "test": "test"}
FRONTAL = ("PA", "AP")

IMPRESSIONS = ("CONCLUSION", "IMPRESSON", "IMPRESION", "IMPRSSION", "IMPERSSION", "IMPESSION")
"""Headings of an impression that lack the word, most of them misspelt."""

OF_FINDINGS = ("FINDINS", "FINDINDGS", "FINDGINGS", "FINDNGS", "FINDNINGS", "FINIDNGS")
OTHER = ("HISTORY", "COMPARISON", "INDICATION", "TECHNIQUE")
"""Words in the headings of sections that are none of these, even where they name the image."""

FILMS = (
    "CHEST", "PORTABLE", "PA AND LAT", "LATERAL AND PA", "AP AND LAT", "LATERAL AND AP", "FRONTAL AND", "TWO VIEWS",
    "FRONTAL VIEW", "PA VIEW", "AP VIEW", "ONE VIEW", "LATERAL VIEW", "BONE WINDOW", "FRONTAL UPRIGHT",
    "FRONTAL SEMI-UPRIGHT", "RIBS",
)  # fmt: skip
"""Words in a heading that names the images that follow, as in "PA AND LATERAL VIEWS OF THE CHEST:"."""

WHOLE = "REPORT"  # the heading that ``sections`` makes of a banner "FINAL REPORT"

Row = dict[str, str]


@dataclass(frozen=True)
class MIMICSource(Published):
    """The tables of MIMIC-CXR-JPG, its images or the DICOM files of MIMIC-CXR, and the reports of MIMIC-CXR.

    One row per frontal image (PA, AP) of a study whose report says something; the text is impression + " " + findings
    (spec 1.1), under the headings that the collection's authors take for these (``meaning``), or where there is neither
    the last paragraphs (``last_paragraphs``), and then what an addendum corrects or adds. Labels keep the published
    values of the study: 1, 0, -1 (uncertain), blank (nan).
    Differs: the published code (MGCA) puts validate and test into one split, and drops addenda and reports that have
    neither section; here they stay apart, and these stay.
    """

    table: ClassVar[str] = "."
    cleans_reports: ClassVar[bool] = True  # by report_text.clean_report

    path: str = field(metadata=BELOW_ROOT)  # folder of mimic-cxr-2.0.0-metadata.csv, -split.csv, -chexpert.csv (or .gz)
    root: str | None = None  # folder that holds files/p10/... with the images; None: text and labels alone
    # folder that holds files/p10/... with the reports; None: root, or else path
    reports: str | None = field(default=None, metadata=BELOW_ROOT)
    suffix: str = "jpg"  # of the images: jpg (MIMIC-CXR-JPG) or dcm (MIMIC-CXR)
    labels: tuple[str, ...] | str = CHEXPERT  # the cohort's labels, in order; names that CheXpert has not are nan
    min_report_words: int = 3  # studies with shorter text are left out
    alone: bool = False  # keep images whose report is empty or too short, as records that have an image alone
    min_sentence_words: int = 1  # of a report; 2 drops sentences of one word ("Cardiomegaly."), as the papers do

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The tables and ``files/`` in ``root``, or in a download of its own below it; so are the reports.

        They are published apart: PhysioNet's folders are mimic-cxr-jpg/2.0.0 and mimic-cxr/2.0.0. Where the reports lie
        elsewhere, ``reports`` says so.
        """
        tables = [f"mimic-cxr-2.0.0-{table}.csv" for table in TABLES]
        downloads = [root, *(folder for form in ("*", "*/2.*") for folder in sorted(root.glob(f"mimic-cxr{form}")))]
        images = next((folder for folder in downloads if first_of(folder, tables)), root)
        require_items("mimic_cxr", images, [*tables, "files"])
        others = (folder for folder in downloads if folder != images)
        reports = next((folder for folder in others if any(folder.glob("files/p1?/p*/s*.txt"))), None)
        return {"path": str(images), "root": str(images)} | ({"reports": str(reports)} if reports else {})

    def listing(self) -> Listing:
        """The images with text. Raises ValueError that names missing tables or columns, or counts missing reports."""
        if self.suffix not in ("jpg", "dcm"):
            raise ValueError(f"mimic_cxr source: suffix is {self.suffix!r}; it must be jpg or dcm")
        films, split, labelled = (self._table(name) for name in TABLES)
        split_of = {row["dicom_id"]: row["split"] for row in split}
        if strange := sum(split_of.get(row["dicom_id"]) not in SPLITS for row in films):
            raise ValueError(
                f"mimic_cxr source: {strange} of {len(films)} images are in no split of {', '.join(SPLITS)}"
            )
        views = [row for row in films if row["ViewPosition"] in FRONTAL]
        frontal = self._reported(views)
        texts, phi = self._texts(frontal)
        rows = [row for row in frontal if texts[row["study_id"]] or self.alone]
        wanted = names_of(self.labels)
        values = dict(zip((row["study_id"] for row in labelled), numbers("mimic_cxr", labelled, CHEXPERT), strict=True))
        blank = [np.nan] * len(CHEXPERT)
        labels = np.array([values.get(row["study_id"], blank) for row in rows], dtype=np.float32)
        root = Path(self.root) if self.root else None
        return Listing(
            source="mimic_cxr",
            keys=[row["dicom_id"] for row in rows],
            patients=[row["subject_id"] for row in rows],
            studies=[row["study_id"] for row in rows],
            reports=[texts[row["study_id"]] for row in rows],
            labels=by_name(labels.reshape(-1, len(CHEXPERT)), CHEXPERT, wanted),
            names=wanted,
            splits=[SPLITS[split_of[row["dicom_id"]]] for row in rows],
            files=None
            if root is None
            else [root / study_folder(row) / f"{row['dicom_id']}.{self.suffix}" for row in rows],
            left_out={
                "not frontal": len(films) - len(views),
                "report empty or too short": len(frontal) - len(rows),
                **({"report not under reports": absent} if (absent := len(views) - len(frontal)) else {}),
            },
            phi=phi,
            subgroups={"view": [row["ViewPosition"] for row in rows]},
        )

    def _table(self, name: str) -> list[Row]:
        """The rows of one table, zipped or not. Raises ValueError naming every table that is missing."""
        files: dict[str, Path] = {}
        missing: list[str] = []
        for table in TABLES:
            plain = Path(self.path) / f"mimic-cxr-2.0.0-{table}.csv"
            zipped = plain.with_name(f"{plain.name}.gz")
            if not (plain.is_file() or zipped.is_file()):
                missing.append(plain.name)
            files[table] = plain if plain.is_file() else zipped
        if missing:
            raise ValueError(f"mimic_cxr source: path lacks {', '.join(missing)} (or .gz)")
        return list(read_rows("mimic_cxr", files[name], TABLES[name]))

    def _reported(self, films: list[Row]) -> list[Row]:
        """The images whose report is there. Raises ValueError for more studies without than ``max_missing``."""
        there = {row["study_id"]: self._report(row).is_file() for row in films}
        missing = sum(not one for one in there.values())
        where = "reports are not in files/ there: they are a download of their own, and reports=FOLDER says where it is"
        refuse_absent("mimic_cxr", missing, len(there), self.max_missing, where)
        return [row for row in films if there[row["study_id"]]]

    def _report(self, film: Row) -> Path:
        return (Path(self.reports or self.root or self.path) / study_folder(film)).with_suffix(".txt")

    def _texts(self, films: list[Row]) -> tuple[dict[str, str], dict[str, int]]:
        """Study -> text ("" where it has none), and how many reports hold each kind of identifier."""
        files = {row["study_id"]: self._report(row) for row in films}
        raw = {study: file.read_text(encoding="utf-8", errors="replace") for study, file in files.items()}
        return {study: self._text(report) for study, report in raw.items()}, searched(self.cache, [*raw.values()], raw)

    def _text(self, report: str) -> str:
        """Impression, findings and addenda of a report, cleaned."""
        texts: dict[str, list[str]] = {"IMPRESSION": [], "FINDINGS": [], "ADDENDUM": [], "": []}
        headed = sections(report)
        for heading, text in headed.items():
            texts[meaning(heading)].append(text)
        if not (texts["IMPRESSION"] or texts["FINDINGS"]):
            texts["FINDINGS"] = [last_paragraphs(report, headed)]
        both = " ".join(texts["IMPRESSION"] + texts["FINDINGS"] + texts["ADDENDUM"])
        return clean_report(both, self.min_report_words, self.min_sentence_words)


def last_paragraphs(report: str, headed: dict[str, str]) -> str:
    """What a report says of whose ``headed`` texts none is impression or findings.

    As in the authors' parser: all but the first paragraph of its last section, behind "COMPARISON: None.". Of one
    without headings all paragraphs but a title in capitals.
    """
    heading, text = next(((name, of) for name, of in reversed(headed.items()) if meaning(name) != "ADDENDUM"), ("", ""))
    if not headed:
        heading, text = WHOLE, report
    first, *others = re.split(r"\n[^\S\n]*\n", text)
    return "\n".join(others if heading != WHOLE or first.isupper() else [first, *others])


def meaning(heading: str) -> str:
    """IMPRESSION, FINDINGS, ADDENDUM, or "" for a section that is none of them.

    As in the section parser of the collection's authors (https://github.com/MIT-LCP/mimic-cxr, txt/section_parser.py):
    a heading that describes the study begins its findings.
    """
    if "IMPRESSION" in heading or heading in IMPRESSIONS:
        return "IMPRESSION"
    if "FINDING" in heading or heading in OF_FINDINGS:
        return "FINDINGS"
    if "ADDENDUM" in heading:
        return "ADDENDUM"
    if any(word in heading for word in OTHER):
        return ""
    return "FINDINGS" if any(words in heading for words in FILMS) else ""


def study_folder(row: Row) -> Path:
    """The folder of a MIMIC-CXR study, relative to the root of the collection, e.g. files/p10/p10000032/s50414267."""
    patient = f"p{row['subject_id']}"
    return Path("files") / patient[:3] / patient / f"s{row['study_id']}"
