"""SIIM-ACR Pneumothorax (Kaggle, 2019): films of NIH ChestX-ray14 with outlined pneumothoraces, without reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedvlp.data.labels import by_name, names_of
from fedvlp.data.sources.candid_ptx import outlines
from fedvlp.data.sources.published import Listing, Published, first_of, read_rows, require_items
from fedvlp.data.sources.table import BELOW_ROOT

FOLDERS = ("dicom-images-train", "stage_2_images")


@dataclass(frozen=True)
class SIIMSource(Published):
    """``train-rle.csv`` or ``stage_2_train.csv`` (one row per outline), and the folder of its films.

    The cohort has one row per film. Pneumothorax is 1 where any of its rows has an outline, else 0; other findings are
    not labelled. The tables have no patients: two films of one patient count as two patients. Splits are drawn: the
    published test films have no public outlines. The films are NIH's, so this is no other site than ``nih_cxr14``.
    """

    table: ClassVar[str] = "train-rle.csv"

    path: str = field(metadata=BELOW_ROOT)  # train-rle.csv or stage_2_train.csv, or the CSV as .gz or .zip
    root: str | None = None  # folder of <ImageId>.dcm, searched through; None: labels alone, no image is read
    labels: tuple[str, ...] | str = (
        "Pneumothorax",
    )  # the cohort's labels, in order; names other than Pneumothorax are nan

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The table and the folder of the films, of either stage."""
        tables = [cls.table, "stage_2_train.csv"]
        require_items("siim", root, [" or ".join(tables), " or ".join(FOLDERS)])
        return {"path": str(first_of(root, tables)), "root": str(root)}

    def listing(self) -> Listing:
        """The films. Raises ValueError if columns or films are missing, or an outline is neither run lengths nor -1."""
        rows = read_rows("siim", self.path, ("ImageId", "EncodedPixels"))
        outlined = outlines("siim", ((row["ImageId"], row["EncodedPixels"]) for row in rows))
        keys, wanted = list(outlined), names_of(self.labels)
        values = np.array(list(outlined.values()), dtype=np.float32).reshape(-1, 1)
        return Listing(
            source="siim",
            keys=keys,
            patients=keys,
            studies=keys,
            reports=[""] * len(keys),
            labels=by_name(values, ("Pneumothorax",), wanted),
            names=wanted,
            splits=[""] * len(keys),
            files=self._files(keys),
        )

    def _files(self, keys: list[str]) -> list[Path] | None:
        """The film of each key, anywhere under root; None without a root."""
        if self.root is None:
            return None
        files = {file.stem: file for file in sorted(Path(self.root).rglob("*.dcm"))}
        return [files.get(key, Path(self.root) / f"{key}.dcm") for key in keys]
