"""RSNA Pneumonia, stage 2 (Shih et al., 2019, doi:10.1148/ryai.2019180041): films with boxes, without reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedvlp.data.labels import by_name, names_of
from fedvlp.data.masks import Box
from fedvlp.data.sources.published import Listing, Published, first_of, read_rows, require_items
from fedvlp.data.sources.table import BELOW_ROOT

CLASSES = {  # class of stage_2_detailed_class_info.csv -> labels (No Finding, Lung Opacity)
    "Normal": (1.0, 0.0),
    "No Lung Opacity / Not Normal": (0.0, 0.0),
    "Lung Opacity": (0.0, 1.0),
}
NAMES = ("Pneumonia", "No Finding", "Lung Opacity")
SIDE = 1024
"""Pixels of every film, which is a square; boxes are in these."""


@dataclass(frozen=True)
class RSNASource(Published):
    """``stage_2_train_labels.csv`` (one row per box), the folder of its films, and the detailed class info.

    The cohort has one row per patient, who has one film. Pneumonia is the column Target: 1 where there is a box. The
    mask of Pneumonia is the union of a film's boxes (spec 10.3).
    """

    table: ClassVar[str] = "stage_2_train_labels.csv"

    path: str = field(metadata=BELOW_ROOT)  # stage_2_train_labels.csv, or the CSV as .gz or .zip
    root: str | None = None  # folder of <patientId>.dcm, or that above stage_2_train_images; None: labels alone
    # stage_2_detailed_class_info.csv; None: No Finding and Lung Opacity are nan
    classes: str | None = field(default=None, metadata=BELOW_ROOT)
    labels: tuple[str, ...] | str = NAMES  # the cohort's labels, in order; names that the tables have not are nan
    val_fraction: float = field(default=0.15, kw_only=True)  # of the patients
    test_fraction: float = field(default=0.15, kw_only=True)  # of the patients

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The table of boxes, the films, and the detailed classes if they are there."""
        require_items("rsna", root, [cls.table, "stage_2_train_images"])
        classes = first_of(root, ["stage_2_detailed_class_info.csv"])
        given = {"path": str(first_of(root, [cls.table])), "root": str(root)}
        return given | ({"classes": str(classes)} if classes else {})

    def listing(self) -> Listing:
        """The patients. Raises ValueError if columns are missing, a patient's rows disagree, or a box is none."""
        columns = ("patientId", "x", "y", "width", "height", "Target")
        target = self._agreed(self.path, columns, "Target", ("0", "1"))
        boxes = self._boxes(columns)
        detail = self._agreed(self.classes, ("patientId", "class"), "class", CLASSES) if self.classes else {}
        unknown = (np.nan, np.nan)
        values = [(float(box), *CLASSES.get(detail.get(key, ""), unknown)) for key, box in target.items()]
        wanted, keys = names_of(self.labels), list(target)
        return Listing(
            source="rsna",
            keys=keys,
            patients=keys,
            studies=keys,
            reports=[""] * len(keys),
            labels=by_name(np.array(values, dtype=np.float32).reshape(-1, len(NAMES)), NAMES, wanted),
            names=wanted,
            splits=[""] * len(keys),
            files=self._files(keys),
            boxes=None if self.root is None else {NAMES[0]: [boxes[key] for key in keys]},
        )

    def _boxes(self, columns: tuple[str, ...]) -> dict[str, tuple[Box, ...]]:
        """Patient -> boxes, as shares of the film's side. Raises ValueError for one that is none of such a film."""
        boxes: dict[str, tuple[Box, ...]] = {}
        strange = 0
        for row in read_rows("rsna", self.path, columns):
            drawn = boxes.setdefault(row["patientId"], ())
            if row["Target"].strip() == "1":
                box = _box([row[name] for name in columns[1:5]])
                strange += box is None
                boxes[row["patientId"]] = drawn if box is None else (*drawn, box)
        if strange:
            raise ValueError(
                f"rsna source: {strange} boxes are not x, y, width and height within {SIDE} pixels; give the table as "
                "it was published"
            )
        return boxes

    def _files(self, keys: list[str]) -> list[Path] | None:
        if self.root is None:
            return None
        unpacked = Path(self.root) / "stage_2_train_images"
        return [(unpacked if unpacked.is_dir() else Path(self.root)) / f"{key}.dcm" for key in keys]

    def _agreed(self, path: str, columns: tuple[str, ...], column: str, known: object) -> dict[str, str]:
        """Patient -> value of a column, in the table's order. Raises ValueError for unknown or differing values."""
        values: dict[str, str] = {}
        strange = 0
        for row in read_rows("rsna", path, columns):
            value = row[column].strip()
            strange += value not in known or values.setdefault(row["patientId"], value) != value  # type: ignore[operator]
        if strange:
            raise ValueError(f"rsna source: in {strange} rows {column} is unknown, or not that of the patient's others")
        return values


def _box(cells: list[str]) -> Box | None:
    """The box of the cells x, y, width and height, as shares of the film's side; None where it is not on the film."""
    try:
        left, top, width, height = (float(cell) / SIDE for cell in cells)
    except ValueError:
        return None
    inside = min(left, top) >= 0 and min(width, height) > 0 and max(left + width, top + height) <= 1
    return (left, top, width, height) if inside else None
