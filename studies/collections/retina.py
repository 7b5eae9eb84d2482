"""Retinal photographs with grades, whose captions take the place of reports: MESSIDOR, BRSET and mBRSET."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedvlp.data.report_text import is_missing
from fedvlp.data.sources.published import Photographs, read_rows, refuse_absent, require_items
from fedvlp.data.sources.tabular import TableFilm, TabularSource

NAMES = ("Diabetic Retinopathy", "Macular Edema")

ICDR = (
    "no diabetic retinopathy",
    "mild non-proliferative diabetic retinopathy",
    "moderate non-proliferative diabetic retinopathy",
    "severe non-proliferative diabetic retinopathy",
    "proliferative diabetic retinopathy",
)
"""The grades 0 to 4 of the international scale (ICDR) in words."""

EDEMA = ("no macular edema", "macular edema")


def grades(source: str, column: str, cells: Sequence[str], highest: int) -> list[int]:
    """The grades 0 to ``highest`` ("2" or "2.0") in the cells of a column. Raises ValueError where one holds none."""
    known = {text: level for level in range(highest + 1) for text in (f"{level}", f"{level}.0")}
    strange = sum(cell.strip() not in known for cell in cells)
    if strange:
        raise ValueError(
            f"{source} source: {strange} of {len(cells)} values of {column} are no grade of 0 to {highest}; give the "
            "table as it was published"
        )
    return [known[cell.strip()] for cell in cells]


BASES = tuple(f"Base{department}{number}" for department in (1, 2, 3) for number in (1, 2, 3, 4))
MESSIDOR_COLUMNS = ("Image name", "Retinopathy grade", "Risk of macular edema")

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


def findings(retinopathy: int, edema: int) -> dict[str, float]:
    """Diabetic Retinopathy and Macular Edema are grades of 1 or more."""
    return dict(zip(NAMES, (float(retinopathy > 0), float(edema > 0)), strict=True))


def caption(retinopathy: str, edema: str) -> str:
    """FedDRA's template (spec 11); there are few different captions, so a batch holds many of the same."""
    return f"retinal image with {retinopathy} and {edema}"


@dataclass(frozen=True, kw_only=True)
class RetinaSource(TabularSource, Photographs):
    """Base class of collections without published splits: they are drawn, 70/15/15 by patient (spec 10.2)."""

    labels: tuple[str, ...] | str = NAMES  # the cohort's labels, in order; names other than these are nan
    val_fraction: float = 0.15  # of the patients, 0..1
    test_fraction: float = 0.15  # of the patients, 0..1
    seed: int = 42  # of the drawn splits


@dataclass(frozen=True, kw_only=True)
class MessidorSource(RetinaSource):
    """MESSIDOR (Decenciere et al., 2014, doi:10.5566/ias.1155): twelve folders Base11, ..., Base34 with a table each.

    ``path`` is the folder of the twelve. The tables are published as .xls: save each as CSV. The published errata are
    applied. The collection has no patient ids.
    """

    known: ClassVar[str] = "messidor"
    table: ClassVar[str] = "."
    needs: ClassVar[tuple[str, ...]] = BASES

    def films(self) -> Iterator[TableFilm]:
        """The photographs of all folders. Raises ValueError that lists missing folders and tables."""
        for base in self._bases():
            yield from self._of(base)

    def _bases(self) -> list[Path]:
        """The twelve folders. Raises ValueError for missing ones, and for tables that are not CSV."""
        folder = Path(self.path)
        require_items(self.known, folder, BASES)
        bases = [folder / name for name in BASES]
        if lacking := [base.name for base in bases if not (base / f"Annotation_{base.name}.csv").is_file()]:
            raise ValueError(
                f"messidor source: Annotation_<folder>.csv is not in {', '.join(lacking)}; save each published .xls as "
                "CSV beside it"
            )
        return bases

    def _of(self, base: Path) -> Iterator[TableFilm]:
        """The photographs of one folder, grades corrected."""
        image, retinopathy, risk = MESSIDOR_COLUMNS
        rows = list(read_rows(self.known, base / f"Annotation_{base.name}.csv", MESSIDOR_COLUMNS))
        status = grades(self.known, retinopathy, [row[retinopathy] for row in rows], 3)
        edema = grades(self.known, risk, [row[risk] for row in rows], 2)
        for row, published, level in zip(rows, status, edema, strict=True):
            file = base.absolute() / Path(row[image].strip()).name
            grade = CORRECTED.get(file.stem, published)
            yield TableFilm(
                key=f"{base.name}/{file.stem}",
                file=file,
                findings=findings(grade, level),
                report=caption(STATUS[grade], RISK[level]),
                left_out="repeated image (errata)" if base.name == "Base33" and file.stem in REPEATED else "",
            )


@dataclass(frozen=True, kw_only=True)
class BRSETSource(RetinaSource):
    """BRSET (Nakayama et al., 2024, doi:10.1371/journal.pdig.0000454): photographs of <image_id>.jpg, with grades.

    Diabetic Retinopathy is DR_ICDR of 1 or more. (The column diabetic_retinopathy says otherwise in about 15 rows.)
    """

    known: ClassVar[str] = "brset"
    table: ClassVar[str] = "labels_brset.csv"
    needs: ClassVar[tuple[str, ...]] = ("fundus_photos",)
    published_as: ClassVar[Mapping[str, str]] = {"root": "fundus_photos"}
    without_file: ClassVar[int] = 7  # rows of the published table that have no photograph

    def films(self) -> Iterator[TableFilm]:
        """The rows. Raises ValueError where columns, grades or more photographs than published are missing."""
        published = list(read_rows(self.known, self.path, ("image_id", "patient_id", "DR_ICDR", "macular_edema")))
        files = [Path(f"{Path(row['image_id']).name}.jpg") for row in published]
        there = [self.root is None or (Path(self.root) / file).is_file() for file in files]
        if there.count(False) > self.without_file:
            refuse_absent(self.known, there.count(False), len(published), self.max_missing)
        rows = [(row, file) for row, file, present in zip(published, files, there, strict=True) if present]
        status = grades(self.known, "DR_ICDR", [row["DR_ICDR"] for row, _ in rows], 4)
        edema = grades(self.known, "macular_edema", [row["macular_edema"] for row, _ in rows], 1)
        for (row, file), grade, level in zip(rows, status, edema, strict=True):
            text = caption(ICDR[grade], EDEMA[level])
            yield TableFilm(row["image_id"], file, findings(grade, level), row["patient_id"], report=text)
        for file in (file for file, present in zip(files, there, strict=True) if not present):
            yield TableFilm(file.stem, file, {}, left_out="image not under root")


@dataclass(frozen=True, kw_only=True)
class MBRSETSource(RetinaSource):
    """mBRSET (Wu et al., 2025, doi:10.1038/s41597-025-04627-3): photographs of a handheld camera, with grades.

    Diabetic Retinopathy is final_icdr of 1 or more. Photographs that were not graded are left out.
    """

    known: ClassVar[str] = "mbrset"
    table: ClassVar[str] = "labels_mbrset.csv"
    needs: ClassVar[tuple[str, ...]] = ("images",)
    published_as: ClassVar[Mapping[str, str]] = {"root": "images"}

    def films(self) -> Iterator[TableFilm]:
        """The photographs. Raises ValueError for cells that are no grade."""
        published = list(read_rows(self.known, self.path, ("patient", "file", "final_icdr", "final_edema")))
        graded = [row for row in published if not (is_missing(row["final_icdr"]) or is_missing(row["final_edema"]))]
        status = grades(self.known, "final_icdr", [row["final_icdr"] for row in graded], 4)
        swollen = [{"no": "0", "yes": "1"}.get(row["final_edema"].strip().lower(), "") for row in graded]
        edema = grades(self.known, "final_edema", swollen, 1)
        for row, grade, level in zip(graded, status, edema, strict=True):
            file, text = Path(Path(row["file"]).name), caption(ICDR[grade], EDEMA[level])
            yield TableFilm(file.name, file, findings(grade, level), row["patient"], report=text)
        for row in published:
            if is_missing(row["final_icdr"]) or is_missing(row["final_edema"]):
                yield TableFilm(row["file"], Path(row["file"]), {}, left_out="not graded")
