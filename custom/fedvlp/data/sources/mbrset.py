"""mBRSET (Wu et al., 2025, doi:10.1038/s41597-025-04627-3): photographs of a handheld retinal camera, with grades."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedvlp.data.report_text import is_missing
from fedvlp.data.sources import retina
from fedvlp.data.sources.published import Listing, first_of, read_rows, require_items
from fedvlp.data.sources.table import BELOW_ROOT

SWOLLEN = {"no": "0", "yes": "1"}
COLUMNS = ("patient", "file", "final_icdr", "final_edema")


@dataclass(frozen=True)
class MBRSETSource(retina.RetinaSource):
    """``labels_mbrset.csv`` and ``images/``. Splits are drawn by patient (70/15/15, spec 10.2): none are published.

    Diabetic Retinopathy is final_icdr of 1 or more. Photographs that were not graded are left out. Texts are captions
    of the grades (spec 11).
    """

    table: ClassVar[str] = "labels_mbrset.csv"

    path: str = field(metadata=BELOW_ROOT)  # labels_mbrset.csv
    root: str | None = None  # folder of the photographs ("1.1.jpg"); None: labels and captions alone

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The table and the folder of the photographs."""
        require_items("mbrset", root, [cls.table, "images"])
        return {"path": str(first_of(root, [cls.table])), "root": str(root / "images")}

    def listing(self) -> Listing:
        """The graded photographs. Raises ValueError for missing columns and for cells that are no grade."""
        published = list(read_rows("mbrset", self.path, COLUMNS))
        rows = [row for row in published if not any(is_missing(row[name]) for name in ("final_icdr", "final_edema"))]
        status = retina.grades("mbrset", "final_icdr", [row["final_icdr"] for row in rows], 4)
        swollen = [SWOLLEN.get(row["final_edema"].strip().lower(), "") for row in rows]
        keys = [Path(row["file"]).name for row in rows]
        return self.graded(
            keys,
            [row["patient"] for row in rows],
            (retina.ICDR, status),
            (retina.EDEMA, retina.grades("mbrset", "final_edema", swollen, 1)),
            None if self.root is None else [Path(self.root) / key for key in keys],
            {"not graded": len(published) - len(rows)},
        )
