"""What the collections of retinal photographs share: their labels, and the captions that take the place of reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedvlp.data.labels import by_name, names_of
from fedvlp.data.sources.published import Listing, Published

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


@dataclass(frozen=True, kw_only=True)
class RetinaSource(Published):
    """Base class: Diabetic Retinopathy and Macular Edema are grades of 1 or more, texts are captions of the grades.

    No collection has a published split: splits are drawn, 70/15/15 by patient where there are patients (spec 10.2).
    """

    labels: tuple[str, ...] | str = NAMES  # the cohort's labels, in order; names other than these are nan
    val_fraction: float = 0.15  # of the patients, 0..1
    test_fraction: float = 0.15  # of the patients, 0..1
    seed: int = 42  # of the drawn splits

    def graded(
        self,
        keys: Sequence[str],
        patients: Sequence[str],
        retinopathy: tuple[Sequence[str], Sequence[int]],
        edema: tuple[Sequence[str], Sequence[int]],
        files: Sequence[Path] | None,
        left_out: Mapping[str, int],
    ) -> Listing:
        """The listing of N photographs; ``retinopathy``, ``edema``: words for each grade, and the grades [N]."""
        texts = [
            # FedDRA's template (spec 11); there are few different captions, so a batch holds many of the same
            f"retinal image with {retinopathy[0][status]} and {edema[0][risk]}"
            for status, risk in zip(retinopathy[1], edema[1], strict=True)
        ]
        values = np.array([retinopathy[1], edema[1]], dtype=np.float32).reshape(2, -1).T > 0  # [N, 2]
        wanted = names_of(self.labels)
        return Listing(
            source=self.source_name(),
            keys=keys,
            patients=patients,
            studies=keys,
            reports=texts,
            labels=by_name(values.astype(np.float32), NAMES, wanted),
            names=wanted,
            splits=[""] * len(keys),
            files=files,
            left_out=left_out,
        )
