"""CheXpert (Irvin et al., 2019, https://arxiv.org/abs/1901.07031): radiographs with labels, without reports."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedvlp.data.labels import CHEXPERT, by_name, names_of
from fedvlp.data.sources.published import Listing, Published, read_rows
from fedvlp.data.sources.table import BELOW_ROOT

_PATH = re.compile(r"(?P<folder>train|valid)/(?P<patient>patient\d+)/(?P<study>study\d+)/(?P<view>[^/]+)$")


@dataclass(frozen=True)
class CheXpertSource(Published):
    """``train.csv`` or ``valid.csv`` as published, and the folder that its paths are relative to.

    Labels keep the published values: 1, 0, -1 (uncertain), blank (nan). The objective decides how they count.
    """

    table: ClassVar[str] = "CheXpert-v1.0/train.csv"

    path: str = field(metadata=BELOW_ROOT)  # the CSV, or the CSV as .gz
    root: str | None = None  # parent of CheXpert-v1.0(-small); None: labels alone, no image is read
    labels: tuple[str, ...] | str = CHEXPERT  # the cohort's labels, in order; names that CheXpert has not are nan
    frontal: bool = True  # leave out the lateral views

    def listing(self) -> Listing:
        """The rows of the table. Raises ValueError if columns are missing or an image path has another form."""
        published = list(read_rows("chexpert", self.path, ("Path", "Frontal/Lateral", *CHEXPERT)))
        rows = [row for row in published if not self.frontal or row["Frontal/Lateral"] == "Frontal"]
        paths = [match for row in rows if (match := _PATH.search(row["Path"])) is not None]
        if len(paths) < len(rows):
            raise ValueError(
                f"chexpert source: {len(rows) - len(paths)} of {len(rows)} values of Path do not end in "
                "train|valid/patient<number>/study<number>/<view>"
            )
        values = np.array([[float(row[name] or "nan") for name in CHEXPERT] for row in rows], dtype=np.float32)
        wanted = names_of(self.labels)
        root = Path(self.root) if self.root else None
        return Listing(
            source="chexpert",
            keys=[path[0] for path in paths],
            patients=[path["patient"] for path in paths],
            studies=[path["patient"] + path["study"] for path in paths],
            reports=[""] * len(rows),
            labels=by_name(values.reshape(-1, len(CHEXPERT)), CHEXPERT, wanted),
            names=wanted,
            splits=["val" if path["folder"] == "valid" else "" for path in paths],
            files=None if root is None else [root / row["Path"] for row in rows],
            left_out={"not frontal": len(published) - len(rows)},
        )
