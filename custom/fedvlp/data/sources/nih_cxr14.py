"""NIH ChestX-ray14 (Wang et al., 2017, https://arxiv.org/abs/1705.02315): radiographs with labels, without reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedvlp.data.labels import CHEXPERT, NIH, from_terms, names_of
from fedvlp.data.sources.published import Listing, Published, first_of, read_rows, require_items, undamaged
from fedvlp.data.sources.table import BELOW_ROOT

SUBGROUPS = {"sex": "Patient Gender", "age": "Patient Age", "view": "View Position"}


@dataclass(frozen=True)
class NIHSource(Published):
    """``Data_Entry_2017(_v2020).csv`` as published, and the folder under which its images lie (images_001, ...).

    A finding that is not listed is absent (0): the collection has no blanks and no uncertain values.
    """

    table: ClassVar[str] = "Data_Entry_2017_v2020.csv"

    path: str = field(metadata=BELOW_ROOT)  # the CSV, or the CSV as .gz
    root: str | None = None  # folder of the images, searched through; None: labels alone, no image is read
    # the published test_list.txt; None: test patients are drawn
    test_list: str | None = field(default=None, metadata=BELOW_ROOT)
    labels: tuple[str, ...] | str = CHEXPERT  # the cohort's labels, in order; names without a term of NIH's are nan

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The table, in its first or its later name, and the published test list if it is there."""
        names = [cls.table, "Data_Entry_2017.csv"]
        require_items("nih_cxr14", root, [" or ".join(names)])
        listed = first_of(root, ["test_list.txt"])
        return {"path": str(first_of(root, names)), "root": str(root)} | ({"test_list": str(listed)} if listed else {})

    def listing(self) -> Listing:
        """The rows of the table. Raises ValueError if columns or images are missing."""
        columns = ("Image Index", "Finding Labels", "Patient ID", "Follow-up #")
        rows = list(read_rows("nih_cxr14", self.path, columns, SUBGROUPS.values()))
        keys = [row["Image Index"] for row in rows]
        patients = [row["Patient ID"] for row in rows]
        wanted = names_of(self.labels)
        return Listing(
            source="nih_cxr14",
            keys=keys,
            patients=patients,
            studies=[f"{row['Patient ID']}-{row['Follow-up #']}" for row in rows],
            reports=[""] * len(rows),
            labels=from_terms([row["Finding Labels"].split("|") for row in rows], NIH, wanted),
            names=wanted,
            splits=self._splits(keys),
            files=self._files(keys),
            subgroups={name: [row[column] for row in rows] for name, column in SUBGROUPS.items()},
        )

    def _splits(self, keys: list[str]) -> list[str]:
        """Split of each record: "test" for a film on the published list, else "" (to be drawn)."""
        if not self.test_list:
            return [""] * len(keys)
        with undamaged("nih_cxr14", Path(self.test_list)):
            listed = set(Path(self.test_list).read_text(encoding="utf-8").split())
        return ["test" if key in listed else "" for key in keys]

    def _files(self, keys: list[str]) -> list[Path] | None:
        """The image of each key, anywhere under root; None without a root."""
        if self.root is None:
            return None
        files = {file.name: file for file in sorted(Path(self.root).rglob("*.png"))}
        return [files.get(key, Path(self.root) / key) for key in keys]
