"""MESSIDOR (Decenciere et al., 2014, doi:10.5566/ias.1155): retinal photographs with grades, without reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from fedvlp.data.sources import retina
from fedvlp.data.sources.published import Listing, read_rows, require_items
from fedvlp.data.sources.table import BELOW_ROOT

BASES = tuple(f"Base{department}{number}" for department in (1, 2, 3) for number in (1, 2, 3, 4))
COLUMNS = ("Image name", "Retinopathy grade", "Risk of macular edema")

CORRECTED = {
    "20051020_64007_0100_PP": 3, "20051020_63936_0100_PP": 1, "20051020_63045_0100_PP": 0, "20060523_48477_0100_PP": 3,
}  # fmt: skip
"""Retinopathy grades of the published errata (https://www.adcis.net/en/third-party/messidor/)."""

REPEATED = frozenset({
    "20051202_55582_0400_PP", "20051202_41076_0400_PP", "20051202_48287_0400_PP", "20051202_48586_0400_PP",
    "20051202_55457_0400_PP", "20051202_55626_0400_PP", "20051202_54783_0400_PP", "20051202_48575_0400_PP",
    "20051205_32966_0400_PP", "20051202_55484_0400_PP", "20051205_32981_0400_PP", "20051202_55562_0400_PP",
    "20051202_54547_0400_PP",
})  # fmt: skip
"""Photographs of Base33 that the errata name as repetitions of others."""

STATUS = (
    "no diabetic retinopathy", "mild diabetic retinopathy", "moderate diabetic retinopathy",
    "severe diabetic retinopathy",
)  # fmt: skip
RISK = ("no risk of macular edema", "low risk of macular edema", "high risk of macular edema")


class _Photograph(NamedTuple):
    file: Path
    status: int  # 0..3
    risk: int  # 0..2


@dataclass(frozen=True)
class MessidorSource(retina.RetinaSource):
    """The twelve folders Base11, ..., Base34, each with its photographs and ``Annotation_Base11.csv``.

    The tables are published as .xls: save each as CSV. The published errata are applied. The collection has neither
    splits nor patient ids: splits are drawn, and two photographs of one patient count as two patients. Texts are
    captions of the grades (spec 11).
    """

    table: ClassVar[str] = "."

    path: str = field(metadata=BELOW_ROOT)  # the folder of the twelve folders
    root: str | None = None  # the same; None: labels and captions alone, no image is read

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The twelve folders."""
        require_items("messidor", root, BASES)
        return {"path": str(root), "root": str(root)}

    def listing(self) -> Listing:
        """The photographs, without those that are repeated. Raises ValueError that lists missing folders and tables."""
        published = [photograph for base in self._bases() for photograph in self._read(base)]
        rows = [row for row in published if row.file.stem not in REPEATED or row.file.parent.name != "Base33"]
        keys = [f"{row.file.parent.name}/{row.file.stem}" for row in rows]
        return self.graded(
            keys,
            keys,
            (STATUS, [row.status for row in rows]),
            (RISK, [row.risk for row in rows]),
            None if self.root is None else [row.file for row in rows],
            {"repeated image (errata)": len(published) - len(rows)},
        )

    def _bases(self) -> list[Path]:
        """The twelve folders. Raises ValueError for missing ones, and for tables that are not CSV."""
        folder = Path(self.path)
        require_items("messidor", folder, BASES)
        bases = [folder / name for name in BASES]
        if lacking := [base.name for base in bases if not (base / f"Annotation_{base.name}.csv").is_file()]:
            raise ValueError(
                f"messidor source: Annotation_<folder>.csv is not in {', '.join(lacking)}; save each published .xls as "
                "CSV beside it"
            )
        return bases

    @staticmethod
    def _read(base: Path) -> list[_Photograph]:
        """The photographs of one folder, grades corrected."""
        rows = list(read_rows("messidor", base / f"Annotation_{base.name}.csv", COLUMNS))
        status = retina.grades("messidor", COLUMNS[1], [row[COLUMNS[1]] for row in rows], 3)
        risk = retina.grades("messidor", COLUMNS[2], [row[COLUMNS[2]] for row in rows], 2)
        files = [base / Path(row["Image name"].strip()).name for row in rows]
        return [
            _Photograph(file, CORRECTED.get(file.stem, level), edema)
            for file, level, edema in zip(files, status, risk, strict=True)
        ]
