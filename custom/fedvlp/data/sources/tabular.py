"""Chest films whose tables have a row an image: PadChest, CheXpert Plus and VinDr-CXR."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from fedvlp.data.image_names import ImageNames
from fedvlp.data.kept import searched
from fedvlp.data.labels import CHEXPERT, PADCHEST, VINDR, Terms, findings_in, names_of
from fedvlp.data.report_text import clean_report
from fedvlp.data.sources.published import Listing, Published, first_of, read_rows, require_items, undamaged
from fedvlp.data.sources.table import BELOW_ROOT
from fedvlp.data.subgroups import VIEW

FRONTAL = ("AP", "PA", "frontal", "")
"""Views of frontal films, and of those whose view is not known."""


class Film(NamedTuple):
    """A row of a collection's table."""

    key: str  # the collection's own name of the film, unique
    file: str  # its name below root; a suffix may be missing
    patient: str
    study: str
    findings: Mapping[str, float]  # label -> 1, 0 or -1 (uncertain); a label that is missing is not known
    view: str = ""
    sex: str = ""
    age: str = ""
    split: str = ""  # train, val or test; "" is drawn
    report: str = ""


@dataclass(frozen=True)
class TabularSource(Published):
    """Base class of collections whose table has a row an image: ``films`` says what is in a row."""

    cleans_reports: ClassVar[bool] = True  # by report_text.clean_report
    reported: ClassVar[bool] = True  # whether the collection has reports: films without are then left out
    known: ClassVar[str] = ""  # name of the source

    path: str = field(metadata=BELOW_ROOT)  # the table as published, or packed (.gz, .zip)
    root: str | None = None  # folder of the images; None: texts and labels alone
    labels: tuple[str, ...] | str = CHEXPERT  # the cohort's labels, in order; names that the collection lacks are nan
    frontal: bool = True  # leave out the lateral views
    min_report_words: int = 3  # films with shorter reports are left out
    min_sentence_words: int = 1  # of a report; 2 drops sentences of one word ("Cardiomegaly."), as the papers do

    @classmethod
    def source_name(cls) -> str:
        """As in ``SOURCES``."""
        return cls.known

    def films(self) -> Iterator[Film]:
        """The rows of the table. Raises ValueError that names missing tables or columns."""
        raise NotImplementedError

    def listing(self) -> Listing:
        """The usable rows, with the file of each, whatever its suffix. Raises ValueError as ``films`` does."""
        published = list(self.films())
        viewed = [film for film in published if not self.frontal or film.view in FRONTAL]
        texts = {film.report: self._cleaned(film.report) for film in viewed}
        rows = [film for film in viewed if texts[film.report] or not self.reported]
        left_out = {"not frontal": len(published) - len(viewed), "report empty or too short": len(viewed) - len(rows)}
        reports = {film.study: film.report for film in viewed if film.report}
        wanted = names_of(self.labels)
        labels = [[film.findings.get(name, np.nan) for name in wanted] for film in rows]
        grouped = {VIEW: [film.view for film in rows], "sex": [film.sex for film in rows], "age": [f.age for f in rows]}
        return Listing(
            source=self.known,
            keys=[film.key for film in rows],
            patients=[film.patient for film in rows],
            studies=[film.study for film in rows],
            reports=[texts[film.report] for film in rows],
            labels=np.array(labels, dtype=np.float32).reshape(len(rows), len(wanted)),
            names=wanted,
            splits=[film.split for film in rows],
            files=None if self.root is None else self._files(Path(self.root).resolve(), rows),
            left_out={reason: count for reason, count in left_out.items() if count},
            phi=searched(self.cache, list(reports.values()), reports),
            subgroups={name: values for name, values in grouped.items() if any(values)},
        )

    def _cleaned(self, report: str) -> str:
        return clean_report(report, self.min_report_words, self.min_sentence_words)

    @staticmethod
    def _files(root: Path, rows: list[Film]) -> list[Path]:
        names = ImageNames(root)
        return [names.find(film.file)[0] or root / film.file for film in rows]


def _mentioned(terms: Collection[str] | None, meanings: Terms) -> dict[str, float]:
    """Label -> whether one of its ``meanings`` is among the ``terms``; nothing for a film that nobody labelled."""
    if terms is None:
        return {}
    return {name: float(not set(meaning).isdisjoint(terms)) for name, meaning in meanings.items()}


@dataclass(frozen=True)
class PadChestSource(TabularSource):
    """PadChest (Bustos et al., 2020, https://arxiv.org/abs/1901.07441): 160,000 films with Spanish reports.

    The reports are published as word stems ("cambi pulmonar cronic"). Images lie in the folders of their archives
    (0, 1, ... 54), or all in one. Splits are drawn.
    """

    known: ClassVar[str] = "padchest"
    table: ClassVar[str] = "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv"

    def films(self) -> Iterator[Film]:
        """A film's age is that at its study; what the tables call L is lateral."""
        columns = ("ImageID", "ImageDir", "StudyID", "PatientID", "Projection", "Report", "Labels")
        optional = ("StudyDate_DICOM", "PatientBirth", "PatientSex_DICOM")
        views = {"PA": "PA", "AP": "AP", "AP_horizontal": "AP", "L": "lateral", "COSTAL": "ribs", "EXCLUDE": "none"}
        for row in read_rows(self.known, self.path, columns, optional):
            terms = {term.lower() for term in findings_in(row["Labels"], ",")}
            folder = Path(self.root or "", row["ImageDir"])
            years = [row["StudyDate_DICOM"][:4], row["PatientBirth"].partition(".")[0]]
            yield Film(
                key=row["ImageID"],
                file=f"{row['ImageDir']}/{row['ImageID']}" if row["ImageDir"] and folder.is_dir() else row["ImageID"],
                patient=row["PatientID"],
                study=row["StudyID"],
                findings=_mentioned(terms or None, PADCHEST),
                view=views.get(row["Projection"], ""),
                sex=row["PatientSex_DICOM"],
                age=str(int(years[0]) - int(years[1])) if all(map(str.isdigit, years)) else "",
                report=row["Report"],
            )


@dataclass(frozen=True)
class CheXpertPlusSource(TabularSource):
    """CheXpert Plus (Chambon et al., 2024, https://arxiv.org/abs/2405.19538): CheXpert's films with their reports.

    The text is impression + " " + findings. Labels are CheXbert's of the reports, where ``labelled`` is given. The
    published split is train and valid; a test split is drawn by patient from train.
    """

    known: ClassVar[str] = "chexpert_plus"
    table: ClassVar[str] = "df_chexpert_plus_240401.csv"

    # chexbert_labels/report_fixed.json or another of them: an object a line; None: no labels
    labelled: str | None = field(default=None, metadata=BELOW_ROOT)

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The images, as PNG or DICOM, are in a folder of their own, which an archive may have twice."""
        require_items(cls.known, root, [cls.table])
        folders = [root / name for name in ("", "PNG", "PNG/PNG", "DICOM", "DICOM/DICOM")]
        images = next((folder for folder in folders if first_of(folder, ["train", "valid"])), root)
        labels = first_of(root, [f"chexbert_labels/{of}_fixed.json" for of in ("report", "impression", "findings")])
        given = {"path": str(first_of(root, [cls.table])), "root": str(images)}
        return given | ({"labelled": str(labels)} if labels else {})

    def films(self) -> Iterator[Film]:
        """Of DICOM and PNG files the names have another suffix than in the table."""
        columns = ("path_to_image", "frontal_lateral", "deid_patient_id", "section_findings", "section_impression")
        labels = self._labelled()
        for row in read_rows(self.known, self.path, columns, ("ap_pa", "split", "sex", "age")):
            path = Path(row["path_to_image"])
            frontal = row["frontal_lateral"].lower() == "frontal"
            yield Film(
                key=path.as_posix(),
                file=path.with_suffix("").as_posix(),
                patient=row["deid_patient_id"],
                study=path.parent.as_posix(),
                findings=labels.get(path.as_posix(), {}),
                view=(row["ap_pa"] if row["ap_pa"] in FRONTAL[:2] else "frontal") if frontal else "lateral",
                sex=row["sex"],
                age=row["age"],
                split="val" if row["split"].startswith("val") or path.parts[0] == "valid" else "",
                report=f"{row['section_impression']} {row['section_findings']}".strip(),
            )

    def _labelled(self) -> dict[str, dict[str, float]]:
        """Image -> its labels that are not blank. Raises ValueError for a file that is no such list."""
        if self.labelled is None:
            return {}
        try:
            with undamaged(self.known, Path(self.labelled)):
                rows = [json.loads(line) for line in Path(self.labelled).read_text(encoding="utf-8").splitlines()]
            return {
                row["path_to_image"]: {name: float(row[name]) for name in CHEXPERT if row.get(name) is not None}
                for row in rows
            }
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ValueError) and "source:" in str(error):
                raise
            raise ValueError(
                f"{self.known} source: labelled is no list of labels by path_to_image, a line each"
            ) from None


@dataclass(frozen=True)
class VinDrSource(TabularSource):
    """VinDr-CXR (Nguyen et al., 2022, doi:10.1038/s41597-022-01498-w): films labelled by radiologists, no reports.

    A film has a class where one of its radiologists says so, in PhysioNet's tables of labels or by a box in Kaggle's
    ``train.csv``. ``labels`` may name their classes too ("Aortic enlargement"). The tables have no patients: two films
    of one patient count as two patients.
    """

    known: ClassVar[str] = "vindr_cxr"
    table: ClassVar[str] = "annotations"
    cleans_reports: ClassVar[bool] = False
    reported: ClassVar[bool] = False

    path: str = field(metadata=BELOW_ROOT)  # PhysioNet's folder annotations, or Kaggle's train.csv

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """PhysioNet's folders, or those of Kaggle's competition, of which the test films have no labels."""
        tables = ["annotations", "train.csv"]
        require_items(cls.known, root, [" or ".join(tables), "train"])
        return {"path": str(first_of(root, tables)), "root": str(root)}

    def films(self) -> Iterator[Film]:
        """Each film once, with the classes of all its rows."""
        folder = Path(self.path)
        if not folder.is_dir():
            yield from self._of("train", self._boxed(folder))
            return
        require_items(self.known, folder, ["image_labels_train.csv"])
        for split in ("train", "test"):
            if table := first_of(folder, [f"image_labels_{split}.csv"]):
                yield from self._of(split, self._tabled(table))

    def _of(self, split: str, classes: dict[str, dict[str, float]]) -> Iterator[Film]:
        for key, of_film in classes.items():
            have = {name: terms for name, terms in VINDR.items() if not of_film.keys().isdisjoint(terms)}
            named = _mentioned([name for name, value in of_film.items() if value], have)
            given = "test" if split == "test" else ""
            yield Film(key, f"{split}/{key}", key, key, {**of_film, **named}, split=given)

    def _boxed(self, table: Path) -> dict[str, dict[str, float]]:
        """Film -> class -> whether it has a box of it, of all classes that any film has."""
        rows = list(read_rows(self.known, table, ("image_id", "class_name")))
        none = dict.fromkeys((row["class_name"] for row in rows), 0.0)
        films = {row["image_id"]: dict(none) for row in rows}
        for row in rows:
            films[row["image_id"]][row["class_name"]] = 1.0
        return films

    def _tabled(self, table: Path) -> dict[str, dict[str, float]]:
        """Film -> class -> 1 where one of its rows has 1."""
        films: dict[str, dict[str, float]] = {}
        for row in read_rows(self.known, table, ("image_id",), VINDR_CLASSES):
            film = films.setdefault(row["image_id"], {})
            for name in VINDR_CLASSES:
                if row[name]:
                    film[name] = max(film.get(name, 0.0), float(row[name] not in ("0", "0.0")))
        return films


VINDR_CLASSES = (
    "Aortic enlargement", "Atelectasis", "Calcification", "Cardiomegaly", "Clavicle fracture", "Consolidation", "Edema",
    "Emphysema", "Enlarged PA", "ILD", "Infiltration", "Lung Opacity", "Lung cavity", "Lung cyst", "Mediastinal shift",
    "Nodule/Mass", "Pleural effusion", "Pleural thickening", "Pneumothorax", "Pulmonary fibrosis", "Rib fracture",
    "Other lesion", "COPD", "Lung tumor", "Pneumonia", "Tuberculosis", "Other diseases", "Other disease", "No finding",
)  # fmt: skip
"""The columns of PhysioNet's tables of labels, of which two are one by its names in train and test."""
