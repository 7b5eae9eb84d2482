"""BRSET (Nakayama et al., 2024, doi:10.1371/journal.pdig.0000454): retinal photographs with grades, without reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedvlp.data.sources import retina
from fedvlp.data.sources.published import Listing, first_of, read_rows, require_items
from fedvlp.data.sources.table import BELOW_ROOT

WITHOUT_FILE = 7
"""So many rows of the published table have no photograph."""


@dataclass(frozen=True)
class BRSETSource(retina.RetinaSource):
    """``labels_brset.csv`` and ``fundus_photos/<image_id>.jpg``. Splits are drawn by patient: none are published.

    Diabetic Retinopathy is DR_ICDR of 1 or more. (The column diabetic_retinopathy says otherwise in about 15 rows.)
    Texts are captions of the grades (spec 11).
    """

    table: ClassVar[str] = "labels_brset.csv"

    path: str = field(metadata=BELOW_ROOT)  # labels_brset.csv
    root: str | None = None  # folder of <image_id>.jpg; None: labels and captions alone, no image is read

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The table and the folder of the photographs."""
        require_items("brset", root, [cls.table, "fundus_photos"])
        return {"path": str(first_of(root, [cls.table])), "root": str(root / "fundus_photos")}

    def listing(self) -> Listing:
        """The rows with a photograph. Raises ValueError where columns, grades or more photographs are missing."""
        published = list(read_rows("brset", self.path, ("image_id", "patient_id", "DR_ICDR", "macular_edema")))
        rows = [row for row in published if self.root is None or self._file(row["image_id"]).is_file()]
        if len(published) - len(rows) > max(WITHOUT_FILE, self.max_missing * len(published)):
            raise ValueError(
                f"brset source: {len(published) - len(rows)} of {len(published)} images are not under root; at most "
                f"{WITHOUT_FILE} rows of the published table have none; max_missing takes a part of it"
            )
        status = retina.grades("brset", "DR_ICDR", [row["DR_ICDR"] for row in rows], 4)
        edema = retina.grades("brset", "macular_edema", [row["macular_edema"] for row in rows], 1)
        keys = [row["image_id"] for row in rows]
        return self.graded(
            keys,
            [row["patient_id"] for row in rows],
            (retina.ICDR, status),
            (retina.EDEMA, edema),
            None if self.root is None else [self._file(key) for key in keys],
            {"no photograph": len(published) - len(rows)},
        )

    def _file(self, key: str) -> Path:
        return Path(self.root or "") / f"{Path(key).name}.jpg"
