"""Chest ImaGenome (Wu et al., 2021, https://arxiv.org/abs/2108.00316): findings by region of MIMIC-CXR's images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedvlp.data.deid import scan
from fedvlp.data.labels import CHEXPERT, Terms, names_of
from fedvlp.data.report_text import clean_report
from fedvlp.data.sources.mimic_cxr import study_folder
from fedvlp.data.sources.published import Listing, Published, read_rows, require_items
from fedvlp.data.sources.table import BELOW_ROOT

SPLITS = {"train": "train", "valid": "val", "test": "test"}
COLUMNS = ("subject_id", "study_id", "dicom_id", "path")

TERMS: Terms = {
    "Enlarged Cardiomediastinum": ("mediastinal widening",),
    "Cardiomegaly": ("enlarged cardiac silhouette",),
    "Lung Opacity": ("lung opacity",),
    "Lung Lesion": ("lung lesion", "mass/nodule (not otherwise specified)"),
    "Edema": ("pulmonary edema/hazy opacity",),
    "Consolidation": ("consolidation",),
    "Pneumonia": ("pneumonia",),
    "Atelectasis": ("atelectasis",),
    "Pneumothorax": ("pneumothorax",),
    "Pleural Effusion": ("pleural effusion",),
}
"""CheXpert's name: the attributes of a region that mean it. The other names are not labelled."""

Row = dict[str, str]


@dataclass(frozen=True)
class ChestImaGenomeSource(Published):
    """The silver scene graphs: the sentences of each image's regions as its text, their attributes as labels.

    A finding is 1 where any region has it, 0 where regions are said to be free of it and none has it, else nan. The
    published split is by patient. The images, the patients and so the hashed ids are MIMIC-CXR's.
    """

    table: ClassVar[str] = "silver_dataset"
    needs: ClassVar[tuple[str, ...]] = ("files",)  # MIMIC-CXR-JPG's
    cleans_reports: ClassVar[bool] = True  # by report_text.clean_report

    path: str = field(metadata=BELOW_ROOT)  # silver_dataset, with scene_graph/ and splits/
    root: str | None = None  # folder of MIMIC-CXR-JPG's files/; None: text and labels alone
    suffix: str = "jpg"  # of the images: jpg (MIMIC-CXR-JPG) or dcm (MIMIC-CXR)
    labels: tuple[str, ...] | str = CHEXPERT  # the cohort's labels, in order; names without an attribute are nan
    min_report_words: int = 3  # images with shorter text are left out
    min_sentence_words: int = 1  # of a report; 2 drops sentences of one word ("Cardiomegaly."), as the papers do

    def listing(self) -> Listing:
        """The images of the three splits but for those to avoid. Raises ValueError for what is missing or no graph."""
        published, splits = self._rows()
        avoided = {row["dicom_id"] for row in read_rows("chest_imagenome", self._split("images_to_avoid"), COLUMNS)}
        rows = [(row, split) for row, split in zip(published, splits, strict=True) if row["dicom_id"] not in avoided]
        graphs = [self._graph(row["dicom_id"]) for row, _ in rows]
        texts = [
            clean_report(". ".join(sentences), self.min_report_words, self.min_sentence_words)
            for sentences, _ in graphs
        ]
        used = [index for index, text in enumerate(texts) if text]
        wanted = names_of(self.labels)
        labels = np.array([_labels(graphs[index][1], wanted) for index in used], dtype=np.float32)
        return Listing(
            source="chest_imagenome",
            people="mimic_cxr",
            keys=[rows[index][0]["dicom_id"] for index in used],
            patients=[rows[index][0]["subject_id"] for index in used],
            studies=[rows[index][0]["study_id"] for index in used],
            reports=[texts[index] for index in used],
            labels=labels.reshape(-1, len(wanted)),
            names=wanted,
            splits=[rows[index][1] for index in used],
            files=None if self.root is None else [self._film(rows[index][0]) for index in used],
            left_out={
                "images to avoid": len(published) - len(rows),
                "text empty or too short": len(rows) - len(used),
            },
            phi=scan((" ".join(sentences) for sentences, _ in graphs), (row["dicom_id"] for row, _ in rows)),
        )

    def _rows(self) -> tuple[list[Row], list[str]]:
        """The rows of the three splits, and the split of each."""
        require_items("chest_imagenome", Path(self.path), ["scene_graph", "splits"])
        files = [f"{name}.csv" for name in (*SPLITS, "images_to_avoid")]
        require_items("chest_imagenome", Path(self.path) / "splits", files)
        rows, splits = [], []
        for name, split in SPLITS.items():
            own = list(read_rows("chest_imagenome", self._split(name), COLUMNS))
            rows += own
            splits += [split] * len(own)
        graphs = {file.name for file in (Path(self.path) / "scene_graph").iterdir()}
        if missing := sum(f"{row['dicom_id']}_SceneGraph.json" not in graphs for row in rows):
            raise ValueError(f"chest_imagenome source: {missing} of {len(rows)} scene graphs are not in scene_graph")
        return rows, splits

    def _split(self, name: str) -> Path:
        return Path(self.path) / "splits" / f"{name}.csv"

    def _film(self, row: Row) -> Path:
        """The image of a row, whose published path is relative to MIMIC-CXR's folder and ends in .dcm."""
        return Path(self.root or "") / study_folder(row) / f"{row['dicom_id']}.{self.suffix}"

    def _graph(self, key: str) -> tuple[list[str], dict[str, bool]]:
        """The different sentences of an image, in order, and its attributes: whether any region has it."""
        file = Path(self.path) / "scene_graph" / f"{key}_SceneGraph.json"
        try:
            regions = json.loads(file.read_text(encoding="utf-8"))["attributes"]
            sentences = dict.fromkeys(sentence for region in regions for sentence in region["phrases"])
            attributes: dict[str, bool] = {}
            for present, name in _attributes(regions):
                attributes[name] = attributes.get(name, False) or present
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"chest_imagenome source: a file in scene_graph is no scene graph ({type(error).__name__}); expected "
                "attributes with phrases and attributes"
            ) from None
        return list(sentences), attributes


def _attributes(regions: list[dict[str, Any]]) -> Iterator[tuple[bool, str]]:
    """(whether it is there, name) of every attribute "category|yes|name" of a graph; cues of other forms are none."""
    for region in regions:
        for sentence in region["attributes"]:
            for attribute in sentence:
                _, present, name = (*attribute.split("|", 2), "", "")[:3]
                if present in ("yes", "no"):
                    yield present == "yes", name


def _labels(attributes: dict[str, bool], names: tuple[str, ...]) -> list[float]:
    """1, 0 or nan of each name."""
    values = []
    for name in names:
        said = [attributes[term] for term in TERMS.get(name, ()) if term in attributes]
        values.append(float(any(said)) if said else np.nan)
    return values
