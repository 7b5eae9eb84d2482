"""CheXpert (Irvin et al., 2019, https://arxiv.org/abs/1901.07031): radiographs with labels, without reports."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedvlp.data.labels import CHEXPERT, by_name, names_of
from fedvlp.data.sources.published import Listing, Published, first_of, numbers, read_rows, require_items
from fedvlp.data.sources.table import BELOW_ROOT
from fedvlp.data.subgroups import VIEW

_PATH = re.compile(r"(?P<folder>train|valid)/(?P<patient>patient\d+)/(?P<study>study\d+)/(?P<view>[^/]+)$")
SUBGROUPS = {"sex": "Sex", "age": "Age"}
PROJECTION = "AP/PA"


@dataclass(frozen=True)
class CheXpertSource(Published):
    """``train.csv`` or ``valid.csv`` as published, or both, and the folder that their paths are relative to.

    The published split is train and valid, by patient; a test split is drawn by patient from train.csv. Labels keep the
    published values: 1, 0, -1 (uncertain), blank (nan). The objective decides how they count.
    """

    table: ClassVar[str] = "CheXpert-v1.0/train.csv"

    path: str = field(metadata=BELOW_ROOT)  # the CSV, or the CSV as .gz
    root: str | None = None  # CheXpert-v1.0(-small), or its parent; None: labels alone, no image is read
    valid: str | None = field(default=None, metadata=BELOW_ROOT)  # valid.csv, beside train.csv; None: val is drawn
    labels: tuple[str, ...] | str = CHEXPERT  # the cohort's labels, in order; names that CheXpert has not are nan
    frontal: bool = True  # leave out the lateral views

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """``root`` is the folder of the collection, in either resolution, or the folder above it."""
        if first_of(root, ["train.csv"]):
            folder = root
        else:
            names = ["CheXpert-v1.0", "CheXpert-v1.0-small"]
            require_items("chexpert", root, [" or ".join(names)])
            folder = first_of(root, names) or root
            require_items("chexpert", folder, ["train.csv"])
        valid = first_of(folder, ["valid.csv"])
        given = {"path": str(first_of(folder, ["train.csv"])), "root": str(folder)}
        return given | ({"valid": str(valid)} if valid else {})

    def listing(self) -> Listing:
        """The rows of the tables. Raises ValueError if columns are missing or an image path has another form."""
        columns = ("Path", "Frontal/Lateral", *CHEXPERT)
        optional = (*SUBGROUPS.values(), PROJECTION)
        tables = [self.path, self.valid] if self.valid else [self.path]
        published = [row for table in tables for row in read_rows("chexpert", table, columns, optional)]
        rows = [row for row in published if not self.frontal or row["Frontal/Lateral"] == "Frontal"]
        paths = [match for row in rows if (match := _PATH.search(row["Path"])) is not None]
        if len(paths) < len(rows):
            raise ValueError(
                f"chexpert source: {len(rows) - len(paths)} of {len(rows)} values of Path do not end in "
                "train|valid/patient<number>/study<number>/<view>"
            )
        values = numbers("chexpert", rows, CHEXPERT)
        wanted = names_of(self.labels)
        root = Path(self.root) if self.root else None
        return Listing(
            source="chexpert",
            keys=[path[0] for path in paths],
            patients=[path["patient"] for path in paths],
            studies=[path["patient"] + path["study"] for path in paths],
            reports=[""] * len(rows),
            labels=by_name(values, CHEXPERT, wanted),
            names=wanted,
            splits=["val" if path["folder"] == "valid" else "" for path in paths],
            files=None if root is None else self._files(root, rows, paths),
            left_out={"not frontal": len(published) - len(rows)},
            subgroups={
                **{name: [row[column] for row in rows] for name, column in SUBGROUPS.items()},
                VIEW: [_view(row) for row in rows],
            },
        )

    @staticmethod
    def _files(root: Path, rows: list[dict[str, str]], paths: list[re.Match[str]]) -> list[Path]:
        """The image of each row. The folder of the collection may have another name than ``Path`` gives it."""
        within = rows and (root / Path(rows[0]["Path"]).parts[0]).is_dir()
        return [root / (row["Path"] if within else path[0]) for row, path in zip(rows, paths, strict=True)]


def _view(row: dict[str, str]) -> str:
    """AP, PA, or frontal where the table does not say which; lateral."""
    frontal = row["Frontal/Lateral"] == "Frontal"
    return row[PROJECTION] or "frontal" if frontal else row["Frontal/Lateral"]
