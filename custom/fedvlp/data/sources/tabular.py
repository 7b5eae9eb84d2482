"""Chest X-rays whose tables have a row an image, or a row an outline: each collection says what is in a row."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from fedvlp.data.images import ImageNames, files_below, is_beside
from fedvlp.data.labels import CHEXPERT, NIH, PADCHEST, VINDR, Terms, findings_in, names_of
from fedvlp.data.masks import Box
from fedvlp.data.report_text import clean_report
from fedvlp.data.screening import searched
from fedvlp.data.sources.published import Listing, Published, first_of, numbers, read_rows, require_items, undamaged
from fedvlp.data.sources.table import BELOW_ROOT
from fedvlp.data.subgroups import VIEW, view_of
from fedvlp.data.text_restoration import restorations


class TableFilm(NamedTuple):
    """An image of a collection, as its table has it."""

    key: str  # the collection's own name of the image, unique
    file: Path | str  # its path below root; a text may lack the suffix, and is looked for by name
    findings: Mapping[str, float]  # label -> 1, 0 or -1 (uncertain); a label that is missing is not known
    patient: str | None = None  # None: the collection names none, and two images of one patient count as two patients
    study: str | None = None  # None: the image is a study of its own
    view: str = ""  # AP, PA or another; "" is not known
    lateral: bool = False  # or of another view than a frontal one
    sex: str = ""
    age: str = ""
    split: str = ""  # train, val or test; "" is drawn
    report: str = ""
    left_out: str = ""  # why it is not in the cohort


@dataclass(frozen=True)
class TabularSource(Published):
    """Base class of collections whose table has a row an image: ``films`` says what is in a row.

    The fields below ``root`` are named when a source is built.
    """

    known: ClassVar[str]  # name of the source, as in ``SOURCES``
    anywhere: ClassVar[str] = ""  # files such as "*.png" that are looked for by name in all folders below root
    reported: ClassVar[bool] = False  # whether the collection has reports

    path: str = field(metadata=BELOW_ROOT)  # the table as published, or packed (.gz, .zip)
    root: str | None = None  # folder of the images; None: no image is read
    # Python 3.10 cannot resolve the type hints of a class with dataclasses.KW_ONLY
    # the cohort's labels, in order; names that the collection lacks are nan
    labels: tuple[str, ...] | str = field(default=CHEXPERT, kw_only=True)
    frontal: bool = field(default=True, kw_only=True)  # leave out the lateral views, where the collection has such

    def films(self) -> Iterable[TableFilm]:
        """What the table lists. Raises ValueError that names missing tables or columns, or counts strange cells."""
        raise NotImplementedError

    def listing(self) -> Listing:
        """The usable rows, with the file of each. Raises ValueError as ``films`` does."""
        published = list(self.films())
        left_out = Counter(filter(None, map(self._refused, published)))
        viewed = [film for film in published if not self._refused(film)]
        texts = {film.report: self.cleaned(film.report) for film in viewed}
        rows = [film for film in viewed if self._takes(texts[film.report])]
        left_out["report empty or too short"] += len(viewed) - len(rows)
        reports = {_study(film): film.report for film in viewed if film.report}
        wanted = names_of(self.labels)
        labels = [[film.findings.get(name, np.nan) for name in wanted] for film in rows]
        grouped = {"sex": [film.sex for film in rows], "age": [f.age for f in rows], VIEW: [film.view for film in rows]}
        return Listing(
            source=self.known,
            keys=[film.key for film in rows],
            patients=[film.key if film.patient is None else film.patient for film in rows],
            studies=[_study(film) for film in rows],
            reports=[texts[film.report] for film in rows],
            labels=np.array(labels, dtype=np.float32).reshape(len(rows), len(wanted)),
            names=wanted,
            splits=[film.split for film in rows],
            files=None if self.root is None else self._files(Path(self.root), rows),
            noted=restorations(reports.values()) if self.reported else {},
            left_out=+left_out,  # those of which there are any
            phi=searched(self.cache, list(reports.values()), reports) if self.reported else {},
            subgroups={name: values for name, values in grouped.items() if any(values)},
        )

    def _refused(self, film: TableFilm) -> str:
        """Why an image is not in the cohort; "" where nothing but its report could be the reason."""
        return film.left_out or ("not frontal" if self.frontal and film.lateral else "")

    def cleaned(self, report: str) -> str:
        """The text that the cohort has of a report."""
        return report

    def _takes(self, text: str) -> bool:
        """Whether an image with this text is in the cohort."""
        return True

    def _files(self, root: Path, rows: list[TableFilm]) -> list[Path]:
        named = self._anywhere(root, {Path(film.file).name for film in rows}) if self.anywhere else {}
        names = ImageNames(root.resolve())
        return [
            named.get(Path(film.file).name, root / film.file)
            if isinstance(film.file, Path)
            else names.find(film.file)[0] or root.resolve() / film.file
            for film in rows
        ]

    def _anywhere(self, root: Path, wanted: Collection[str]) -> dict[str, Path]:
        """The one file of each ``wanted`` name, in whatever folder below ``root``; that in ``root`` itself goes first.

        Raises ValueError where several folders have one of a name: which of them is the published one is not known.
        """
        by_name: dict[str, list[Path]] = {}
        for file in files_below(root, self.anywhere):
            if file.name in wanted:
                by_name.setdefault(file.name, []).append(file)
        if several := sum(len(files) > 1 and files[0].parent != root for files in by_name.values()):
            raise ValueError(
                f"{self.source_name()} source: {several} of {len(wanted)} images are in several folders below root, as "
                "copies or small versions are; take those away, or give the folder that has each once"
            )
        return {name: min(files, key=lambda file: file.parent != root) for name, files in by_name.items()}


@dataclass(frozen=True, kw_only=True)
class ReportedSource(TabularSource):
    """Base class of those with reports: images without are left out, unless ``alone`` keeps them."""

    cleans_reports: ClassVar[bool] = True  # by report_text.clean_report
    reported: ClassVar[bool] = True

    min_report_words: int = 3  # images with shorter reports are left out
    min_sentence_words: int = 1  # of a report; 2 drops sentences of one word ("Cardiomegaly."), as the papers do

    alone: bool = False  # keep images whose report is empty or too short, as records that have an image alone

    def _takes(self, text: str) -> bool:
        return bool(text) or self.alone

    def cleaned(self, report: str) -> str:
        """Without what no reader needs, or "" where it is too short."""
        return clean_report(report, self.min_report_words, self.min_sentence_words)


def _study(film: TableFilm) -> str:
    return film.key if film.study is None else film.study


def _mentioned(terms: Collection[str] | None, meanings: Terms) -> dict[str, float]:
    """Label -> whether one of its ``meanings`` is among the ``terms``; nothing for an image that nobody labelled."""
    if terms is None:
        return {}
    return {name: float(not set(meaning).isdisjoint(terms)) for name, meaning in meanings.items()}


@dataclass(frozen=True)
class PadChestSource(ReportedSource):
    """PadChest (Bustos et al., 2020, https://arxiv.org/abs/1901.07441): 160,000 images with Spanish reports.

    The reports are published as word stems ("cambi pulmonar cronic"). Images lie in the folders of their archives
    (0, 1, ... 54), or all in one. Splits are drawn.
    """

    known: ClassVar[str] = "padchest"
    table: ClassVar[str] = "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv"

    def films(self) -> Iterator[TableFilm]:
        """An image's age is that at its study; what the tables call L is lateral."""
        columns = ("ImageID", "ImageDir", "StudyID", "PatientID", "Projection", "Report", "Labels")
        optional = ("StudyDate_DICOM", "PatientBirth", "PatientSex_DICOM")
        for row in read_rows(self.known, self.path, columns, optional):
            terms = {term.lower() for term in findings_in(row["Labels"], ",")}
            folder = Path(self.root or "", row["ImageDir"])
            view = {"EXCLUDE": "none"}.get(row["Projection"]) or view_of(row["Projection"])
            years = [row["StudyDate_DICOM"][:4], row["PatientBirth"].partition(".")[0]]
            yield TableFilm(
                key=row["ImageID"],
                file=f"{row['ImageDir']}/{row['ImageID']}" if row["ImageDir"] and folder.is_dir() else row["ImageID"],
                patient=row["PatientID"],
                study=row["StudyID"],
                findings=_mentioned(terms or None, PADCHEST),
                view=view,
                lateral=view not in ("AP", "PA", ""),
                sex=row["PatientSex_DICOM"],
                age=str(int(years[0]) - int(years[1])) if all(map(str.isdigit, years)) else "",
                report=row["Report"],
            )


@dataclass(frozen=True, kw_only=True)
class CheXpertPlusSource(ReportedSource):
    """CheXpert Plus (Chambon et al., 2024, https://arxiv.org/abs/2405.19538): CheXpert's images with their reports.

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

    def films(self) -> Iterator[TableFilm]:
        """Of DICOM and PNG files the names have another suffix than in the table."""
        columns = ("path_to_image", "frontal_lateral", "deid_patient_id", "section_findings", "section_impression")
        labels = self._labelled()
        for row in read_rows(self.known, self.path, columns, ("ap_pa", "split", "sex", "age")):
            path = Path(row["path_to_image"])
            frontal = row["frontal_lateral"].lower() == "frontal"
            yield TableFilm(
                key=path.as_posix(),
                file=path.with_suffix("").as_posix(),
                patient=row["deid_patient_id"],
                study=path.parent.as_posix(),
                findings=labels.get(path.as_posix(), {}),
                view=(row["ap_pa"] if row["ap_pa"] in ("AP", "PA") else "frontal") if frontal else "lateral",
                lateral=not frontal,
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
    """VinDr-CXR (Nguyen et al., 2022, doi:10.1038/s41597-022-01498-w): images labelled by radiologists, no reports.

    ``path`` is PhysioNet's folder annotations, or Kaggle's train.csv. An image has a class where one of its readers
    says so, in PhysioNet's tables of labels or by a box in Kaggle's table. ``labels`` may name their classes too
    ("Aortic enlargement"). The tables have no patients: two images of one patient count as two patients.
    """

    known: ClassVar[str] = "vindr_cxr"
    table: ClassVar[str] = "annotations"
    published_as: ClassVar[Mapping[str, str]] = {"path": "annotations or train.csv"}
    needs: ClassVar[tuple[str, ...]] = ("train",)  # of Kaggle's competition the test images have no labels

    def films(self) -> Iterator[TableFilm]:
        """Each image once, with the classes of all its rows."""
        folder = Path(self.path)
        if not folder.is_dir():
            yield from self._of("train", self._boxed(folder))
            return
        require_items(self.known, folder, ["image_labels_train.csv"])
        for split in ("train", "test"):
            if table := first_of(folder, [f"image_labels_{split}.csv"]):
                yield from self._of(split, self._tabled(table))

    def _of(self, split: str, classes: dict[str, dict[str, float]]) -> Iterator[TableFilm]:
        for key, of_film in classes.items():
            have = {name: terms for name, terms in VINDR.items() if not of_film.keys().isdisjoint(terms)}
            named = _mentioned([name for name, value in of_film.items() if value], have)
            given = "test" if split == "test" else ""
            yield TableFilm(key, f"{split}/{key}", {**of_film, **named}, split=given)

    def _boxed(self, table: Path) -> dict[str, dict[str, float]]:
        """Image -> class -> whether it has a box of it, of all classes that any image has."""
        rows = list(read_rows(self.known, table, ("image_id", "class_name")))
        none = dict.fromkeys((row["class_name"] for row in rows), 0.0)
        films = {row["image_id"]: dict(none) for row in rows}
        for row in rows:
            films[row["image_id"]][row["class_name"]] = 1.0
        return films

    def _tabled(self, table: Path) -> dict[str, dict[str, float]]:
        """Image -> class -> 1 where one of its rows has 1."""
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


@dataclass(frozen=True, kw_only=True)
class NIHSource(TabularSource):
    """NIH ChestX-ray14 (Wang et al., 2017, https://arxiv.org/abs/1705.02315): images with labels, without reports.

    A finding that is not listed is absent (0): the collection has no blanks and no uncertain values.
    """

    known: ClassVar[str] = "nih_cxr14"
    table: ClassVar[str] = "Data_Entry_2017_v2020.csv"
    published_as: ClassVar[Mapping[str, str]] = {
        "path": "Data_Entry_2017_v2020.csv or Data_Entry_2017.csv",
        "test_list": "test_list.txt",
    }
    anywhere: ClassVar[str] = "*.png"  # in images_001, ...

    # the published test_list.txt; None: test patients are drawn
    test_list: str | None = field(default=None, metadata=BELOW_ROOT)

    def films(self) -> Iterator[TableFilm]:
        """An image on the published list is tested on."""
        columns = ("Image Index", "Finding Labels", "Patient ID", "Follow-up #")
        listed = self._listed()
        for row in read_rows(self.known, self.path, columns, ("Patient Gender", "Patient Age", "View Position")):
            yield TableFilm(
                key=row["Image Index"],
                file=Path(row["Image Index"]),
                findings=_mentioned(row["Finding Labels"].split("|"), NIH),
                patient=row["Patient ID"],
                study=f"{row['Patient ID']}-{row['Follow-up #']}",
                view=row["View Position"],
                sex=row["Patient Gender"],
                age=row["Patient Age"],
                split="test" if row["Image Index"] in listed else "",
            )

    def _listed(self) -> set[str]:
        if not self.test_list:
            return set()
        with undamaged(self.known, Path(self.test_list)):
            return set(Path(self.test_list).read_text(encoding="utf-8").split())


@dataclass(frozen=True, kw_only=True)
class CheXpertSource(TabularSource):
    """CheXpert (Irvin et al., 2019, https://arxiv.org/abs/1901.07031): images with labels, without reports.

    The published split is train and valid, by patient; a test split is drawn by patient from train.csv. Labels keep the
    published values: 1, 0, -1 (uncertain), blank (nan). The objective decides how they count. ``root`` is
    CheXpert-v1.0(-small), or the folder above it, which the tables' paths begin with; or that of the four archives
    (CheXpert-v1.0 batch 1 to 4), unpacked, as the collection is downloaded.
    """

    known: ClassVar[str] = "chexpert"
    table: ClassVar[str] = "CheXpert-v1.0/train.csv"
    form: ClassVar[re.Pattern[str]] = re.compile(r"(train|valid)/(?P<patient>patient\d+)/(?P<study>study\d+)/[^/]+$")

    batch: ClassVar[re.Pattern[str]] = re.compile(r"CheXpert-v1\.0(-small)?[ _]batch[ _]\d", re.IGNORECASE)

    valid: str | None = field(default=None, metadata=BELOW_ROOT)  # valid.csv, beside train.csv; None: val is drawn

    def _batches(self) -> dict[tuple[str, str], Path]:
        """(train or valid, patient) -> folder below root, where the archives were unpacked side by side.

        Those of the training images have the patients' folders at once, or in a folder train.
        """
        root = Path(self.root or "")
        there: dict[tuple[str, str], Path] = {}
        for batch in sorted(root.glob("*")) if self.root else ():
            if self.batch.match(batch.name):
                for split, folder in (("train", batch), ("train", batch / "train"), ("valid", batch / "valid")):
                    there |= {(split, patient.name): patient.relative_to(root) for patient in folder.glob("patient*")}
        return there

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """``root`` is the folder of the collection, in either resolution, or the folder above it.

        Of the four archives it is the folder that holds them all; one of them stands for it.
        """
        if cls.batch.match(root.resolve().name):
            root = root.resolve().parent
        batches = [folder for folder in sorted(root.glob("*")) if cls.batch.match(folder.name)]
        if batches:
            tables = {name: [root, *batches] for name in ("train.csv", "valid.csv")}
            first = {
                name: next(filter(None, (first_of(of, [name]) for of in where)), None) for name, where in tables.items()
            }
            require_items(
                cls.known, batches[0] if first["train.csv"] is None else first["train.csv"].parent, ["train.csv"]
            )
            given = {"path": str(first["train.csv"]), "root": str(root)}
            return given | ({"valid": str(first["valid.csv"])} if first["valid.csv"] else {})
        folder = root
        if not first_of(root, ["train.csv"]):
            names = ["CheXpert-v1.0", "CheXpert-v1.0-small"]
            require_items(cls.known, root, [" or ".join(names)])
            folder = first_of(root, names) or root
            require_items(cls.known, folder, ["train.csv"])
        valid = first_of(folder, ["valid.csv"])
        given = {"path": str(first_of(folder, ["train.csv"])), "root": str(folder)}
        return given | ({"valid": str(valid)} if valid else {})

    def films(self) -> Iterator[TableFilm]:
        """The rows of the tables. The folder of the collection may have another name than the tables give it."""
        columns = ("Path", "Frontal/Lateral", *CHEXPERT)
        tables = [self.path, self.valid] if self.valid else [self.path]
        rows = [row for table in tables for row in read_rows(self.known, table, columns, ("Sex", "Age", "AP/PA"))]
        paths = [match for row in rows if (match := self.form.search(row["Path"])) is not None]
        if len(paths) < len(rows):
            raise ValueError(
                f"{self.known} source: {len(rows) - len(paths)} of {len(rows)} values of Path do not end in "
                "train|valid/patient<number>/study<number>/<view>"
            )
        labels = numbers(self.known, rows, CHEXPERT)
        within = bool(rows) and Path(self.root or "", Path(rows[0]["Path"]).parts[0]).is_dir()
        unpacked = self._batches()
        for row, path, values in zip(rows, paths, labels.tolist(), strict=True):
            frontal = row["Frontal/Lateral"] == "Frontal"
            yield TableFilm(
                key=path[0],
                file=unpacked.get((path[1], path["patient"]), Path(row["Path"] if within else path[0]).parents[1])
                / Path(path[0]).relative_to(Path(path[0]).parents[1]),
                findings=dict(zip(CHEXPERT, values, strict=True)),
                patient=path["patient"],
                study=path["patient"] + path["study"],
                view=row["AP/PA"] or "frontal" if frontal else row["Frontal/Lateral"],
                lateral=not frontal,
                sex=row["Sex"],
                age=row["Age"],
                split="val" if path[1] == "valid" else "",
            )


CLASSES = {  # class of stage_2_detailed_class_info.csv -> findings
    "": {},
    "Normal": {"No Finding": 1.0, "Lung Opacity": 0.0},
    "No Lung Opacity / Not Normal": {"No Finding": 0.0, "Lung Opacity": 0.0},
    "Lung Opacity": {"No Finding": 0.0, "Lung Opacity": 1.0},
}
"""What RSNA's detailed classes say; a patient who has none is in neither."""
SIDE = 1024
"""Pixels of every image of RSNA's, which is a square; boxes are in these."""
PNEUMOTHORAX = "Pneumothorax"
ABSENT = "-1"  # stands for "no outline" in the column EncodedPixels


@dataclass(frozen=True, kw_only=True)
class RSNASource(TabularSource):
    """RSNA Pneumonia, stage 2 (Shih et al., 2019, doi:10.1148/ryai.2019180041): images with boxes, without reports.

    The table has a row a box, the cohort one a patient with one image. Pneumonia is the column Target: 1 where there
    is a box. The mask of Pneumonia is the union of an image's boxes (spec 10.3).
    """

    known: ClassVar[str] = "rsna"
    table: ClassVar[str] = "stage_2_train_labels.csv"
    needs: ClassVar[tuple[str, ...]] = ("stage_2_train_images",)
    published_as: ClassVar[Mapping[str, str]] = {"classes": "stage_2_detailed_class_info.csv"}
    columns: ClassVar[tuple[str, ...]] = ("patientId", "x", "y", "width", "height", "Target")

    # stage_2_detailed_class_info.csv; None: No Finding and Lung Opacity are nan
    classes: str | None = field(default=None, metadata=BELOW_ROOT)
    labels: tuple[str, ...] | str = ("Pneumonia", "No Finding", "Lung Opacity")
    val_fraction: float = 0.15  # of the patients
    test_fraction: float = 0.15  # of the patients

    def films(self) -> Iterator[TableFilm]:
        """The patients, whose rows have to agree."""
        target = self._agreed(self.path, self.columns, "Target", ("0", "1"))
        detail = self._agreed(self.classes, ("patientId", "class"), "class", CLASSES) if self.classes else {}
        unpacked = Path("stage_2_train_images" if Path(self.root or "", "stage_2_train_images").is_dir() else "")
        for key, box in target.items():
            yield TableFilm(key, unpacked / f"{key}.dcm", {"Pneumonia": float(box), **CLASSES[detail.get(key, "")]})

    def listing(self) -> Listing:
        """With the boxes of each image. Raises ValueError for a box that is none of such an image."""
        listing, boxes = super().listing(), self._boxes()
        return replace(
            listing, boxes=None if self.root is None else {"Pneumonia": [boxes[key] for key in listing.keys]}
        )

    def _boxes(self) -> dict[str, tuple[Box, ...]]:
        """Patient -> boxes, as shares of the image's side."""
        boxes: dict[str, tuple[Box, ...]] = {}
        strange = 0
        for row in read_rows(self.known, self.path, self.columns):
            drawn = boxes.setdefault(row["patientId"], ())
            if row["Target"].strip() == "1":
                box = _box([row[name] for name in self.columns[1:5]])
                strange += box is None
                boxes[row["patientId"]] = drawn if box is None else (*drawn, box)
        if strange:
            raise ValueError(
                f"rsna source: {strange} boxes are not x, y, width and height within {SIDE} pixels; give the table as "
                "it was published"
            )
        return boxes

    def _agreed(self, path: str, columns: tuple[str, ...], column: str, known: Collection[str]) -> dict[str, str]:
        """Patient -> value of a column, in the table's order. Raises ValueError for unknown or differing values."""
        values: dict[str, str] = {}
        strange = 0
        for row in read_rows(self.known, path, columns):
            value = row[column].strip()
            strange += not value or value not in known or values.setdefault(row["patientId"], value) != value
        if strange:
            raise ValueError(f"rsna source: in {strange} rows {column} is unknown, or not that of the patient's others")
        return values


def _box(cells: list[str]) -> Box | None:
    """The box of the cells x, y, width and height, as shares of the image's side; None where it is not on the image."""
    try:
        left, top, width, height = (float(cell) / SIDE for cell in cells)
    except ValueError:
        return None
    inside = min(left, top) >= 0 and min(width, height) > 0 and max(left + width, top + height) <= 1
    return (left, top, width, height) if inside else None


def _outlined(source: str, rows: Sequence[tuple[str, str]]) -> dict[str, dict[str, float]]:
    """Image -> whether any of its ``rows`` (image, run lengths or -1) outlines a pneumothorax, in their order.

    Raises ValueError for an outline that is neither.
    """
    outlined: dict[str, dict[str, float]] = {}
    strange = 0
    for key, cell in rows:
        outline = cell.strip()
        strange += outline != ABSENT and not (outline and outline.replace(" ", "").isdigit())
        film = outlined.setdefault(key, {PNEUMOTHORAX: 0.0})
        film[PNEUMOTHORAX] = max(film[PNEUMOTHORAX], float(outline != ABSENT))
    if strange:
        raise ValueError(f"{source} source: EncodedPixels of {strange} rows is neither run lengths nor {ABSENT}")
    return outlined


@dataclass(frozen=True, kw_only=True)
class SIIMSource(TabularSource):
    """SIIM-ACR Pneumothorax (Kaggle, 2019): images of NIH ChestX-ray14 with outlined pneumothoraces, without reports.

    The table has a row an outline, the cohort one an image. Pneumothorax is 1 where a row of it has an outline, else
    0; other findings are not labelled. The tables have no patients. Splits are drawn: the published test images have no
    public outlines. The images are NIH's, so this is no other site than ``nih_cxr14``.
    """

    known: ClassVar[str] = "siim"
    table: ClassVar[str] = "train-rle.csv"
    published_as: ClassVar[Mapping[str, str]] = {"path": "train-rle.csv or stage_2_train.csv"}
    needs: ClassVar[tuple[str, ...]] = ("dicom-images-train or stage_2_images",)
    anywhere: ClassVar[str] = "*.dcm"

    labels: tuple[str, ...] | str = (PNEUMOTHORAX,)

    def films(self) -> Iterator[TableFilm]:
        """Each image once."""
        rows = [(row["ImageId"], row["EncodedPixels"]) for row in read_rows(self.known, self.path, SIIM_COLUMNS)]
        return (TableFilm(key, Path(f"{key}.dcm"), labels) for key, labels in _outlined(self.known, rows).items())


SIIM_COLUMNS = ("ImageId", "EncodedPixels")


@dataclass(frozen=True, kw_only=True)
class CandidPTXSource(ReportedSource):
    """CANDID-PTX (Feng et al., 2021, doi:10.1148/ryai.2021210136): images, reports, outlined pneumothoraces.

    The table has a row an outline, the cohort one an image, named by SOPInstanceUID with or without a suffix.
    Pneumothorax is 1 where any of its rows has an outline, else 0; other findings are not labelled. The collection has
    no patient ids.
    """

    known: ClassVar[str] = "candid_ptx"
    table: ClassVar[str] = "Pneumothorax_reports.csv"
    published_as: ClassVar[Mapping[str, str]] = {"root": "dataset or images"}  # or beside the table

    labels: tuple[str, ...] | str = (PNEUMOTHORAX,)

    def films(self) -> Iterator[TableFilm]:
        """Each image once, with the report of its first row."""
        rows = list(read_rows(self.known, self.path, ("SOPInstanceUID", "EncodedPixels", "Report")))
        reports = {row["SOPInstanceUID"]: row["Report"] for row in reversed(rows)}
        outlined = _outlined(self.known, [(row["SOPInstanceUID"], row["EncodedPixels"]) for row in rows])
        return (TableFilm(key, self._file(key), labels, report=reports[key]) for key, labels in outlined.items())

    def _file(self, key: str) -> Path:
        """An image's file; where none exists, a name that is then counted as missing."""
        candidates = [Path(f"{Path(key).name}{suffix}") for suffix in ("", ".dcm", ".png", ".jpg")]
        return next((file for file in candidates if Path(self.root or "", file).is_file()), candidates[0])


COVID_LABELS = ("No Finding", "Pneumonia", "COVID-19")
"""The classes of COVIDx, of which an image has one. Pneumonia is of other causes than COVID-19."""
COVID_LISTS = ("COVIDx9A", "COVIDx_CXR-3A", "COVIDx8A", "COVIDx9B", "COVIDx_CXR-3B", "COVIDx8B")
"""Releases, of which the first that is there is read: A has three classes, B has COVID-19 or not."""


@dataclass(frozen=True, kw_only=True)
class COVIDxSource(TabularSource):
    """COVIDx (Wang et al., 2020, https://arxiv.org/abs/2003.09871): images of one of three classes, without reports.

    A line of the lists is patient, file, class, source. The published split is train and test; validation patients are
    drawn from train (spec 10.2: 20 %). A patient's number counts within its source.
    """

    known: ClassVar[str] = "covidx"
    table: ClassVar[str] = "train_COVIDx9A.txt"
    published_as: ClassVar[Mapping[str, str]] = {
        "path": " or ".join([*(f"train_{name}.txt" for name in COVID_LISTS), "train.txt"]),
        "test_list": " or ".join([*(f"test_{name}.txt" for name in COVID_LISTS), "test.txt"]),
    }
    needs: ClassVar[tuple[str, ...]] = (published_as["test_list"], "train", "test")

    # the list of test images; None: test patients are drawn
    test_list: str | None = field(default=None, metadata=BELOW_ROOT)
    labels: tuple[str, ...] | str = COVID_LABELS
    val_fraction: float = 0.2  # of the patients

    def films(self) -> Iterator[TableFilm]:
        """The images of both lists."""
        yield from self._read(self.path, "train", "")
        if self.test_list:
            yield from self._read(self.test_list, "test", "test")

    def _read(self, path: str, folder: str, split: str) -> Iterator[TableFilm]:
        """The images of one list. Raises ValueError for a missing list, or lines of another form."""
        file = first_of(Path(path).parent, [Path(path).name])
        if file is None:
            raise ValueError("covidx source: a list of images is not a file")
        with undamaged(self.known, file):
            lines = [line.rsplit(None, 3) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if strange := sum(len(line) != 4 or line[2] not in COVID_CLASSES for line in lines):
            known = ", ".join(COVID_CLASSES)
            raise ValueError(
                f"covidx source: {strange} of {len(lines)} lines are not patient, file, class ({known}), source"
            )
        for patient, name, kind, source in lines:
            key = f"{folder}/{Path(name).name}"
            yield TableFilm(key, Path(key), COVID_CLASSES[kind], f"{source} {patient}", split=split)


def _one_of(classes: Iterable[str], chosen: str) -> dict[str, float]:
    """Findings of a collection whose classes exclude one another."""
    return {name: float(name == chosen) for name in classes}


COVID_CLASSES: dict[str, dict[str, float]] = {
    "normal": _one_of(COVID_LABELS, "No Finding"),
    "pneumonia": _one_of(COVID_LABELS, "Pneumonia"),
    "COVID-19": _one_of(COVID_LABELS, "COVID-19"),
    "positive": _one_of(COVID_LABELS, "COVID-19"),
    "negative": {"COVID-19": 0.0},
}
"""Class in COVIDx's lists -> what it says of an image."""

FOLDERS = {
    "Normal": "No Finding", "Viral Pneumonia": "Pneumonia", "COVID": "COVID-19", "Lung_Opacity": "Lung Opacity",
}  # fmt: skip
"""Folder of COVID-19 Radiography: its label."""


@dataclass(frozen=True, kw_only=True)
class COVIDRadiographySource(TabularSource):
    """COVID-19 Radiography (Rahman et al., 2021, doi:10.1016/j.compbiomed.2021.104319): a folder a class, no table.

    ``path`` is the folder of the four folders, with the images in them or in their ``images/``. The collection has
    neither splits nor patient ids: splits are drawn. Its normal images and lung opacities are RSNA's, so it is no other
    site than ``rsna``.
    """

    known: ClassVar[str] = "covid_radiography"
    table: ClassVar[str] = "."
    needs: ClassVar[tuple[str, ...]] = tuple(FOLDERS)

    labels: tuple[str, ...] | str = tuple(FOLDERS.values())

    def films(self) -> Iterator[TableFilm]:
        """The images, by class and name. Raises ValueError that lists the folders that are missing or empty."""
        require_items(self.known, Path(self.path), FOLDERS)
        of_class = {name: self._of(Path(self.path) / name) for name in FOLDERS}
        if empty := [name for name, files in of_class.items() if not files]:
            raise ValueError(f"covid_radiography source: no .png is in {', '.join(empty)}; unpack the whole archive")
        for folder, label in FOLDERS.items():
            for file in of_class[folder]:
                yield TableFilm(f"{label}/{file.name}", file.absolute(), _one_of(FOLDERS.values(), label))

    @staticmethod
    def _of(folder: Path) -> list[Path]:
        """The images of a class; lung masks, in ``masks/``, are none."""
        images = folder / "images"
        return [file for file in sorted((images if images.is_dir() else folder).glob("*.png")) if not is_beside(file)]
